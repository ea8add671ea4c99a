// The allocations alive at a moment, in stacking order, moved forward event by event.
// Moments are numbered as in the data: 0 is before the first event, i after the i-th.

class Stack {
  constructor(data) {
    const count = data.sizes.length;
    this.data = { ...data, sizes: Float64Array.from(data.sizes) };
    this.next = new Int32Array(count);
    this.previous = new Int32Array(count);
    this.startsAt = new Int32Array(data.times_us.length).fill(-1);
    this.endsAt = new Int32Array(data.times_us.length + 1).fill(-1);
    for (let i = 0; i < count; i++) {
      if (data.starts[i] > 0) this.startsAt[data.starts[i]] = i;
      this.endsAt[data.ends[i]] = i;
    }
    this.rank = new Int32Array(count); // 0 is the largest
    this.bySize = Array.from(data.sizes.keys()).sort((a, b) => data.sizes[b] - data.sizes[a]);
    this.bySize.forEach((i, rank) => { this.rank[i] = rank; });
    this.total = totals(data);
  }

  // Begin at a moment. In each category the `drawn` largest of all allocations are listed, and the others summed.
  begin(moment, drawn) {
    const kinds = this.data.categories.length;
    this.drawn = drawn;
    this.heads = new Int32Array(kinds).fill(-1);
    this.tails = new Int32Array(kinds).fill(-1);
    this.rest = new Float64Array(kinds);
    this.moment = moment;
    for (let i = 0; i < this.data.sizes.length; i++) {
      if (this.data.starts[i] <= moment && moment < this.data.ends[i]) this.add(i);
    }
  }

  moveTo(moment) {
    while (this.moment < moment) {
      this.moment++;
      if (this.endsAt[this.moment] >= 0) this.remove(this.endsAt[this.moment]);
      if (this.startsAt[this.moment] >= 0) this.add(this.startsAt[this.moment]);
    }
  }

  add(i) {
    if (this.rank[i] >= this.drawn) {
      this.rest[this.data.kinds[i]] += this.data.sizes[i];
      return;
    }
    const list = this.data.kinds[i];
    const last = this.tails[list];
    this.previous[i] = last;
    this.next[i] = -1;
    if (last < 0) this.heads[list] = i; else this.next[last] = i;
    this.tails[list] = i;
  }

  remove(i) {
    if (this.rank[i] >= this.drawn) {
      this.rest[this.data.kinds[i]] -= this.data.sizes[i];
      return;
    }
    const list = this.data.kinds[i];
    const before = this.previous[i], after = this.next[i];
    if (before < 0) this.heads[list] = after; else this.next[before] = after;
    if (after < 0) this.tails[list] = before; else this.previous[after] = before;
  }

  // Call paint(item, from, to) for each run of pixel rows, from the bottom upward: item is an allocation, or
  // -2 - category for the sum of others. Row r shows the bytes around low + r / scale. The inner loop takes nearly all
  // the time: with tens of thousands alive, most are less than a row high and are passed over by one comparison.
  rows(low, scale, height, paint) {
    const { sizes } = this.data, next = this.next;
    let bytes = 0, row = 0, following = low + 0.5 / scale; // bytes from which on the next row is reached
    const reach = (item) => {
      const top = Math.min(height, Math.max(row, Math.round((bytes - low) * scale)));
      if (top > row) paint(item, row, top);
      row = top;
      following = low + (row + 0.5) / scale;
    };
    for (let list = 0; list < this.heads.length; list++) {
      for (let i = this.heads[list]; i >= 0; i = next[i]) {
        bytes += sizes[i];
        if (bytes >= following) reach(i);
      }
      if (this.rest[list] > 0) { bytes += this.rest[list]; reach(-2 - list); }
    }
  }
}

function totals(data) {
  const total = new Float64Array(data.times_us.length + 1);
  data.sizes.forEach((size, i) => { total[data.starts[i]] += size; total[data.ends[i]] -= size; });
  for (let m = 1; m < total.length; m++) total[m] += total[m - 1];
  return total.subarray(0, data.times_us.length);
}
