"""tests/constructors.py finds calls that leave a dtype or a device to the defaults, and the packages have none."""

from tests.constructors import PACKAGES, ROOT, violations


def test_it_finds_each_call_that_leaves_something_to_the_defaults() -> None:
    source = """
torch.empty(3)
torch.zeros(3, dtype=torch.float32)
torch.arange(3, device="cpu")
torch.Tensor([1.0])
torch.where(seen, 0.0, -torch.inf)
torch.where(seen, 0.0, t)
torch.empty(3, dtype=torch.float32, device="cpu")
t.new_zeros(3)
np.zeros(3)
"""
    assert [line for line, _ in violations(source)] == [2, 3, 4, 5, 6]


def test_the_packages_have_no_such_call() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, sentence in violations(path.read_text(encoding="utf-8"))
    ]
    assert found == []
