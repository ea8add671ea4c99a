// Products of a warpgroup, on operands in shared memory and in registers.
#include "state.h"

namespace emulator {

namespace {

float half_of(uint32_t pair, int which, bool is_bfloat16) {
    const uint16_t bits = pair >> 16 * which;
    return is_bfloat16 ? static_cast<float>(__nv_bfloat16{bits}) : static_cast<float>(same_bits<_Float16>(bits));
}

float element(uint32_t address, bool is_bfloat16) {
    uint16_t bits;
    if (address + 2 > static_cast<uint32_t>(shared_size)) return fail("an address beyond shared memory", address), 0.0f;
    memcpy(&bits, shared + address, 2);
    return half_of(bits, 0, is_bfloat16);
}

// f(address) for each 16 bytes of the operands in shared memory.
template <typename F>
void each_chunk(const Product& x, F f) {
    const auto each = [&](uint64_t bits, bool over_rows, int n) {
        const Descriptor tile(bits);
        for (int row = 0; row < (over_rows ? 16 : n); row++)
            for (int column = 0; column < (over_rows ? n : 16); column += 8)
                f(over_rows ? tile.over_rows(row, column) : tile.over_columns(row, column));
    };
    if (x.a == nullptr) each(x.a_tile, x.a_over_rows, 64);
    each(x.b_tile, x.b_over_rows, x.n);
}

Sum* sum_of(Thread& thread, float* c) {
    for (Sum& sum : thread.sums)
        if (sum.c == c) return &sum;
    return nullptr;
}

void finish(int group, Operation& x) {
    if (x.is_done) return;
    x.is_done = true;
    const Product& first = x.parts[0];
    const bool is_bfloat16 = first.is_bfloat16;
    static float a[64][16], b[16][256];
    for (int row = 0; row < 64; row++)
        for (int column = 0; column < 16; column++) {
            if (first.a == nullptr) {
                const Descriptor tile(first.a_tile);
                a[row][column] = element(first.a_over_rows ? tile.over_rows(column, row)
                                                               : tile.over_columns(row, column), is_bfloat16);
            } else {
                const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2, i = row % 16 / 8 + column / 8 * 2;
                a[row][column] = half_of(x.a[thread][i], column % 2, is_bfloat16);
            }
        }
    const Descriptor descriptor(first.b_tile);
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < first.n; n++)
            b[k][n] = element(first.b_over_rows ? descriptor.over_rows(k, n) : descriptor.over_columns(n, k),
                              is_bfloat16);
    for (int t = 0; t < GROUP; t++) {
        const Product& part = x.parts[t];
        Sum& sum = *sum_of(threads[group * GROUP + t], part.c);
        for (int i = 0; i < part.n / 2; i++) {
            const int row = t / 32 * 16 + i / 2 % 2 * 8 + t % 32 / 4, column = i / 4 * 8 + t % 4 * 2 + i % 2;
            double total = part.add ? sum.values[i] : 0.0;
            for (int k = 0; k < 16; k++) total += static_cast<double>(a[row][k]) * b[k][column];
            const float nearest = static_cast<float>(total);  // tensor cores do not round but cut off
            const bool is_beyond = std::isfinite(nearest) && std::fabs(nearest) > std::fabs(total);
            sum.values[i] = is_beyond ? std::nextafterf(nearest, 0.0f) : nearest;
        }
    }
}

}  // namespace

void fence_registers() { self().registers_fenced = true; }

void multiply(const Product& product) {
    Thread& thread = self();
    if (!thread.registers_fenced) fail("a product without fence_registers", thread.multiplied);
    const int group = current / GROUP, part = current % GROUP, warp = current / WARP;
    auto& all = operations[group];
    if (thread.multiplied == static_cast<int>(all.size())) all.push_back(std::make_unique<Operation>());
    Operation& x = *all[thread.multiplied++];
    x.parts[part] = product;
    if (product.a != nullptr) memcpy(x.a[part], product.a, sizeof(x.a[part]));
    if (x.come++ == 0)
        x.clock = thread.clock;
    else
        for (size_t i = 0; i < x.clock.size(); i++) x.clock[i] = std::min(x.clock[i], thread.clock[i]);
    const int unit = product_unit(warp);
    if (current % WARP == 0) x.times[part / WARP] = ++unit_times[unit];

    // The accumulators: from the first product on until the wait the thread sees UNKNOWN.
    Sum* sum = sum_of(thread, product.c);
    if (sum == nullptr) {
        thread.sums.push_back({product.c, std::vector<float>(product.c, product.c + product.n / 2), 0});
        sum = &thread.sums.back();
        for (int i = 0; i < product.n / 2; i++) product.c[i] = __uint_as_float(UNKNOWN);
    }
    sum->under_way++;

    if (x.come < GROUP) return;
    for (const Product& each : x.parts)
        if (each.a_tile != x.parts[0].a_tile || each.b_tile != x.parts[0].b_tile || each.add != x.parts[0].add)
            return fail("threads of a warpgroup at different products", thread.multiplied);
    for (int w = 0; w < 4; w++)
        each_chunk(x.parts[0], [&](uint32_t address) {
            if (address % 16 != 0) return fail("an operand that is not aligned", address);
            read_cells(address, 16, {product_unit(group * 4 + w), x.times[w]}, x.clock);
        });
}

void commit_products() {
    self().groups.push_back(self().multiplied);
    self().registers_fenced = false;
}

void wait_for_products(int pending) {
    Thread& thread = self();
    const int group = current / GROUP, part = current % GROUP;
    const int groups = static_cast<int>(thread.groups.size());
    const int until = groups > pending ? thread.groups[groups - 1 - pending] : 0;
    auto& all = operations[group];
    wait_until([&all, until, first = thread.finished] {
        for (int i = first; i < until; i++)
            if (all[i]->come < GROUP) return false;
        return true;
    });
    for (; thread.finished < until; thread.finished++) {
        Operation& x = *all[thread.finished];
        finish(group, x);
        const Product& product = x.parts[part];
        if (product.a != nullptr && memcmp(product.a, x.a[part], sizeof(x.a[part])) != 0)
            fail("an operand in registers written while a product reads it", thread.finished);
        const int unit = product_unit(current / WARP);
        thread.clock[unit] = std::max(thread.clock[unit], x.times[part / WARP]);
        Sum& sum = *sum_of(thread, product.c);
        if (--sum.under_way > 0) continue;
        for (int i = 0; i < product.n / 2; i++)
            if (__float_as_uint(product.c[i]) != UNKNOWN) fail("an accumulator written while a product adds to it", i);
        memcpy(product.c, sum.values.data(), sum.values.size() * sizeof(float));
        thread.sums.erase(thread.sums.begin() + (&sum - thread.sums.data()));
    }
}

}  // namespace emulator
