"""Kernels from outside of the package, by name: the tests ask nothing of them that the contract does not."""

from tests.kernels import own_kernels
from tests.kernels.attention_cases import QUICK_CASES, KernelTests


class OwnKernelTests(KernelTests):
    cases = QUICK_CASES
    random_examples = 10


class TestEinsum(OwnKernelTests):
    name = f"{own_kernels.__name__}:einsum"


class TestOwnFunction(OwnKernelTests):
    name = f"{own_kernels.__name__}:own_function"


class TestOnline(OwnKernelTests):
    name = f"{own_kernels.__name__}:online"
