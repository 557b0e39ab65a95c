"""`python -m experiments.benchmarks.products`: torch's two matrix products on this machine.

In float32, class of sizes by class of sizes, as hoglib times them once a machine (docs/compile.md);
here they are timed anew.
"""

import argparse

from experiments.benchmarks.timing import machine, single_threaded

# The choice of kernels is internal; this command shows the times behind it.
from hoglib._core import matrix_products, timed_products


def rows(times: dict[timed_products.Class, timed_products.Times]) -> list[str]:
    lines = []
    for of, (mm, onednn) in times.items():
        work = 2e-9 * of.m * of.k * of.n
        first = "by columns" if of.columns else "by rows"
        where = {matrix_products.IN_GRAPHS: "in graphs", matrix_products.IN_FUNCTIONS: "everywhere"}
        gains = [
            gain
            for gain in where
            if matrix_products.is_faster(timed_products.Times(mm, onednn), gain)
        ]
        taken = where[max(gains)] if gains else ""
        lines.append(
            f"| {of.m} x {of.k} x {of.n} | {first} | {work / mm:.0f} | {work / onednn:.0f} | "
            f"{mm / onednn:.2f} | {taken} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small sizes only")
    given = parser.parse_args()
    if given.smoke:
        timed_products.SIZES = timed_products.SIZES[:1]
    single_threaded()
    print(f"{machine()}\n")
    print("| m x k x n | first factor | torch.mm, GF/s | oneDNN, GF/s | times as fast | taken |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows(timed_products.measure())))


if __name__ == "__main__":
    main()
