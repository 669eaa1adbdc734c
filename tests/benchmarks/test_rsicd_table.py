"""The table of RSICD: what stands after ±."""

from benchmarks import rsicd_table


def test_the_spread_is_the_sample_standard_deviation():
    assert rsicd_table._spread([12.0, 13.0, 14.0]) == "13.00 ± 1.00"  # the population's is 0.82
    assert rsicd_table._spread([12.0]) == "12.00"
