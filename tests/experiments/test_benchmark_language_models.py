"""The benchmark of language models runs, and its chunks and precisions agree."""

from experiments.benchmarks import language_models


def test_chunks_of_every_size_are_compared_and_measured():
    rows = language_models.memory_rows(small=True)
    assert [row.split(" | ")[:2] for row in rows] == [["| `hvp`", "16"], ["| `ggn_vp`", "16"]]
    assert all(row.count(" s ") == 3 for row in rows)


def test_an_error_in_bfloat16_is_larger_than_in_float32():
    for row in language_models.error_rows(small=True)[:2]:
        single, _, half = (float(cell) for cell in row.strip("| ").split(" | ")[1:])
        assert single < 1e-4 < half < 1
