import math
from functools import partial

import numpy as np
import pytest
import scipy.stats
from metric_cases import binary_table, random_case, tied_case

from sigma_nens_hf.metrics import (
    TABLE_METRICS,
    ExampleTable,
    bootstrap_interval,
    bootstrap_intervals,
    bootstrap_statistic,
    calibration_noise_floor,
    calibration_report,
    classwise_calibration_error,
    expected_calibration_error,
    ood_metrics,
    paired_bootstrap,
    table_metrics,
)


def table_of(case, seed):
    return ExampleTable.of_probabilities(*case(seed))


@pytest.mark.parametrize("method", ["basic", "percentile"])
@pytest.mark.parametrize("metric", TABLE_METRICS)
@pytest.mark.parametrize(("case", "seed"), [(random_case, 37), (tied_case, 21)])
def test_agreement_with_plain_loops(case, seed, metric, method):
    p, y = case(seed)
    p = np.clip(p, 0.1, 0.9) / np.clip(p, 0.1, 0.9).sum(1, keepdims=True)
    table = ExampleTable.of_probabilities(p, y)
    rng = np.random.default_rng(5)
    drawn = [rng.integers(0, len(y), len(y)) for _ in range(50)]
    figures = [TABLE_METRICS[metric](ExampleTable.of_probabilities(p[rows], y[rows])) for rows in drawn]
    value = TABLE_METRICS[metric](table)
    lower, upper = np.quantile(figures, [0.05, 0.95])
    if method == "basic":
        lower, upper = 2 * value - upper, 2 * value - lower
    clipped = np.clip([lower, upper], 0, {"nll": np.inf, "brier": 2}.get(metric, 1))
    interval = bootstrap_interval(table, metric, confidence_level=0.9, n_resamples=50, seed=5, method=method)
    assert interval.value == value
    assert interval[1:] == pytest.approx(tuple(clipped), abs=1e-12)


def test_a_figure_of_arrays_is_drawn_as_one_of_tables():
    p, y = random_case(39)
    of_table = bootstrap_interval(ExampleTable.of_probabilities(p, y), "ece", n_resamples=60, seed=3)
    interval = bootstrap_statistic(expected_calibration_error, (p, y), n_resamples=60, seed=3)
    assert interval.value == of_table.value
    assert interval.upper == pytest.approx(of_table.upper)
    assert max(interval.lower, 0) == pytest.approx(of_table.lower)


def test_rows_of_several_samples_are_drawn_apart():
    p, y = random_case(39)
    rng = np.random.default_rng(4)
    drawn = [rng.integers(0, len(y), len(y)) for _ in range(2)]
    figures = sorted(classwise_calibration_error(p[rows], y[rows]) for rows in drawn)
    interval = bootstrap_statistic(
        classwise_calibration_error, (p, y), n_resamples=2, seed=4, method="percentile", confidence_level=1 - 1e-12
    )
    assert interval[1:] == pytest.approx(figures)
    scores = np.random.default_rng(0)
    inside, outside = scores.normal(size=80), scores.normal(1, size=50)
    interval = bootstrap_statistic(lambda *of_both: ood_metrics(*of_both)["auroc"], inside, outside, n_resamples=200)
    assert interval.value == ood_metrics(inside, outside)["auroc"]
    assert interval.lower < interval.value < interval.upper
    # The variance by J. Hanley, B. McNeil, 1982, of normal scores one deviation apart.
    assert interval.upper - interval.lower == pytest.approx(0.17, abs=0.05)


@pytest.mark.parametrize("samples", [(), ([],), (3,), (([1, 2], [1]),)])
def test_samples_that_do_not_belong_together_are_refused(samples):
    with pytest.raises(ValueError, match="arrays of one length"):
        bootstrap_statistic(np.mean, *samples)


def test_accuracy_agrees_with_scipy():
    table = table_of(random_case, 39)
    expected = scipy.stats.bootstrap(
        [table.correct.astype(float)], np.mean, n_resamples=200, batch=1, method="basic", rng=np.random.default_rng(0)
    ).confidence_interval
    assert bootstrap_interval(table, "accuracy", n_resamples=200)[1:] == pytest.approx(tuple(expected))


def test_coverage_of_the_accuracy():
    truth, covered = 0.8, 0
    for seed in range(150):
        interval = bootstrap_interval(binary_table(200, 1 - truth, seed), "accuracy", n_resamples=100, seed=seed)
        covered += interval.lower <= truth <= interval.upper
    # 95 % of 150 with a deviation of 1.8 %
    assert 0.90 <= covered / 150 < 1


def test_calibration_error_is_corrected_for_its_bias():
    # Perfectly calibrated: all of the plain figure is bias.
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.5, 1, 400)
    labels = (rng.random(400) >= confidence).astype(int)
    table = ExampleTable.of_probabilities(np.stack([confidence, 1 - confidence], 1), labels)
    basic = bootstrap_interval(table, "ece", n_resamples=300)
    percentile = bootstrap_interval(table, "ece", n_resamples=300, method="percentile")
    assert basic.lower == 0
    assert percentile.lower > 0
    assert percentile.upper > basic.upper
    assert (percentile.lower + percentile.upper) / 2 > basic.value > (basic.lower + basic.upper) / 2


def test_functions_are_metrics_too():
    table = table_of(random_case, 39)
    assert bootstrap_interval(table, table_metrics.brier_score) == bootstrap_interval(table, "brier")
    # Known with other bins, and so clipped; unknown functions are not.
    known = bootstrap_interval(table.select([0, 1]), partial(table_metrics.expected_calibration_error, n_bins=5))
    unknown = bootstrap_interval(table.select([0, 1]), lambda drawn: TABLE_METRICS["ece"](drawn) - 3)
    assert 0 <= known.lower <= known.upper <= 1
    assert unknown.upper < 0
    whole = bootstrap_interval(table, lambda drawn: len(set(drawn.label_probability)), n_resamples=200)
    assert isinstance(whole.value, float)
    assert whole.lower > whole.value
    mean_entropy = bootstrap_interval(
        ExampleTable.of_probabilities(random_case(39)[0]), lambda drawn: drawn.predictive_entropy.mean()
    )
    assert mean_entropy.lower < mean_entropy.value < mean_entropy.upper


def test_several_metrics_share_the_draws():
    table = table_of(random_case, 39)
    together = bootstrap_intervals(table, ["ece", "nll"], n_resamples=50, seed=2)
    assert together == [bootstrap_interval(table, name, n_resamples=50, seed=2) for name in ("ece", "nll")]
    assert together != bootstrap_intervals(table, ["ece", "nll"], n_resamples=50, seed=3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric", TABLE_METRICS)
def test_degenerate_tables_have_finite_intervals(metric):
    one, other = (ExampleTable.of_probabilities([row], [0]) for row in ([0.8, 0.2], [0.2, 0.8]))
    alike = ExampleTable.of_probabilities([[0.8, 0.2]] * 9, [0] * 9)
    for table in (one, alike):
        value, lower, upper = bootstrap_interval(table, metric, n_resamples=50)
        assert (lower, upper) == pytest.approx((value, value))
    difference = TABLE_METRICS[metric](one) - TABLE_METRICS[metric](other)
    assert paired_bootstrap(one, other, metric, n_resamples=50) == pytest.approx((difference,) * 3)
    assert paired_bootstrap(alike, alike, metric, n_resamples=50) == (0, 0, 0)


@pytest.mark.filterwarnings("error")
def test_infinite_figures_are_their_own_interval():
    sure = ExampleTable.of_probabilities([[1.0, 0.0], [1.0, 0.0]], [0, 1])
    unsure = ExampleTable.of_probabilities([[0.6, 0.4], [0.6, 0.4]], [0, 1])
    assert bootstrap_interval(sure, "nll") == (math.inf,) * 3
    assert paired_bootstrap(unsure, sure, "nll") == (-math.inf,) * 3
    for ours, theirs in [(sure, sure), ([sure, unsure], [unsure, sure])]:
        assert np.isnan(paired_bootstrap(ours, theirs, "nll")).all()
    report = calibration_report(sure, n_resamples=20)
    assert report["nll"] == {"value": math.inf, "lower": math.inf, "upper": math.inf}
    assert report["brier"]["value"] == 1


def test_pairing_narrows_the_interval():
    rng = np.random.default_rng(0)
    hard = rng.random(500) < 0.2
    harder = hard | (rng.random(500) < 0.03)
    ours, theirs = binary_table(500, hard=hard), binary_table(500, hard=harder)
    paired = paired_bootstrap(ours, theirs, "accuracy", n_resamples=500)
    assert paired.difference == pytest.approx(harder.mean() - hard.mean())
    assert 0 < paired.lower < paired.difference < paired.upper
    alone = [bootstrap_interval(table, "accuracy", n_resamples=500) for table in (ours, theirs)]
    unpaired_width = math.hypot(*(interval.upper - interval.lower for interval in alone))
    assert paired.upper - paired.lower < unpaired_width / 2


def test_paired_agrees_with_plain_loops():
    rng = np.random.default_rng(8)
    labels = rng.integers(0, 3, 30)
    ours, theirs = ([rng.dirichlet(np.ones(3), 30) for _ in range(3)] for _ in range(2))

    def difference(rows, seeds):
        figures = [
            [TABLE_METRICS["ece"](ExampleTable.of_probabilities(p[rows], labels[rows])) for p in model]
            for model in (ours, theirs)
        ]
        return np.mean([figures[0][s] - figures[1][s] for s in seeds])

    draws = np.random.default_rng(4)
    drawn = [difference(draws.integers(0, 30, 30), draws.integers(0, 3, 3)) for _ in range(60)]
    value = difference(np.arange(30), range(3))
    upper, lower = 2 * value - np.quantile(drawn, [0.1, 0.9])
    tables = [[ExampleTable.of_probabilities(p, labels) for p in model] for model in (ours, theirs)]
    paired = paired_bootstrap(*tables, "ece", confidence_level=0.8, n_resamples=60, seed=4)
    assert paired == pytest.approx((value, lower, upper))


def test_differences_are_clipped_to_what_is_possible():
    ours, theirs = (binary_table(3, hard=np.array(wrong)) for wrong in ([False] * 3, [True, True, False]))
    # The basic interval of 2/3 with draws from 0 to 1 goes from 1/3 to 4/3.
    assert paired_bootstrap(ours, theirs, "accuracy") == pytest.approx((2 / 3, 1 / 3, 1))


def test_seeds_that_differ_widen_the_interval():
    tables = [binary_table(300, rate, seed) for seed, rate in enumerate([0.1, 0.2, 0.3, 0.4])]
    base = binary_table(300, 0.25, 9)
    of_seeds = paired_bootstrap(tables, [base] * 4, "accuracy", n_resamples=300)
    of_one = paired_bootstrap(tables[1], base, "accuracy", n_resamples=300)
    assert of_one == paired_bootstrap([tables[1]], [base], "accuracy", n_resamples=300)
    assert of_seeds.upper - of_seeds.lower > of_one.upper - of_one.lower


def test_unpaired_tables_are_refused():
    table = binary_table(20)
    for ours, theirs, message in [
        ([], [], "0 of ours and 0 of theirs"),
        ([table, table], table, "2 of ours and 1 of theirs"),
        (table, binary_table(21), "labels differ"),
        (table, ExampleTable.of_probabilities(np.eye(2)[[0, 1] * 10], [0, 1] * 10), "labels differ"),
        (table, ExampleTable.of_probabilities(np.eye(2)), "needs labels"),
    ]:
        with pytest.raises(ValueError, match=message):
            paired_bootstrap(ours, theirs, "accuracy")


@pytest.mark.parametrize(
    "interval_of",
    [bootstrap_interval, lambda table, *args, **options: paired_bootstrap(table, table, *args, **options)],
)
@pytest.mark.parametrize(
    ("metric", "options", "message"),
    [
        ("f1", {}, "no metric 'f1'; there are accuracy, nll"),
        ("ece", {"method": "bca"}, "method must be"),
        ("ece", {"confidence_level": 1}, "confidence_level must be between"),
        ("ece", {"n_resamples": 0}, "n_resamples must be at least 1"),
        (
            lambda drawn: 1.0 if len(set(drawn.probability)) > 12 else math.nan,
            {},
            "infinite or undefined on some draws",
        ),
    ],
)
def test_bad_options_are_refused(interval_of, metric, options, message):
    with pytest.raises(ValueError, match=message):
        interval_of(binary_table(20), metric, **options)


def test_report():
    table = binary_table(300)
    report = calibration_report(table, n_bins=8, n_resamples=40, seed=6)
    assert list(report) == list(TABLE_METRICS)
    for name, entry in report.items():
        metric = TABLE_METRICS[name]
        metric = partial(metric, n_bins=8) if name in ("ece", "ace") else metric
        expected = bootstrap_interval(table, metric, n_resamples=40, seed=6)._asdict()
        if name == "accuracy":  # Wilson's, by its formula
            p, z, n = expected["value"], scipy.stats.norm.ppf(0.975), len(table)
            half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
            centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
            expected |= {"lower": pytest.approx(centre - half), "upper": pytest.approx(centre + half)}
        if name in ("ece", "ace"):
            floor = calibration_noise_floor(table, 8, 40, 6, equal_mass=name == "ace")
            expected |= {"noise_floor_mean": floor.mean, "noise_floor_95": floor.percentile_95}
        assert entry == expected
        assert all(type(figure) is float for figure in entry.values())


def test_votes_are_there_for_metrics_that_read_them():
    logits = np.random.default_rng(0).normal(size=(40, 3, 4))
    table = ExampleTable.of_members(logits, np.arange(40) % 4)

    def first_is_right(drawn):
        return (drawn.member_votes[:, 0] == drawn.label).mean()

    assert bootstrap_interval(table, first_is_right).value == first_is_right(table)
    assert paired_bootstrap(table, table, first_is_right) == (0, 0, 0)


def test_accuracy_near_its_bound_has_an_interval():
    report = calibration_report(ExampleTable.of_probabilities([[0.9, 0.1]] * 5, [0] * 5), n_resamples=10)
    assert report["accuracy"]["value"] == report["accuracy"]["upper"] == 1
    assert 0.5 < report["accuracy"]["lower"] < 0.6


def test_report_does_not_depend_on_votes():
    logits = np.random.default_rng(0).normal(size=(40, 3, 4))
    labels = np.arange(40) % 4
    reports = [
        calibration_report(ExampleTable.of_members(logits, labels, keep_votes=keep), n_resamples=10)
        for keep in (True, False)
    ]
    assert reports[0] == reports[1]


def test_report_needs_labels_and_numbers():
    with pytest.raises(ValueError, match="needs labels"):
        calibration_report(ExampleTable.of_probabilities([[0.5, 0.5]]))
    with pytest.raises(ValueError, match="n_bins must be a whole number"):
        calibration_report(binary_table(5), n_bins=0)
    with pytest.raises(ValueError, match="n_resamples must be at least 1"):
        calibration_report(binary_table(5), n_resamples=0)
