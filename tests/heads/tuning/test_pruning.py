"""Which trials go on, also after a kill at any moment of the decision."""

from contextlib import nullcontext, suppress
from dataclasses import replace

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.storages import JournalStorage
from small_tunings import numbers, tuned

from xret.heads.tuning.trials import Halving, Pruned, _reporting

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Dask's own threads and sockets
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:distributed"),
]


@pytest.mark.parametrize("before_the_report", [True, False])
def test_a_trial_that_was_killed_before_it_heard_that_it_is_pruned_is_pruned(
    stores, whole, tmp_path, monkeypatch, before_the_report
):
    pruned = next(trial for trial in whole[1].trials if trial.status == "pruned")

    def killed(root, number, epochs):
        after_epoch = _reporting(root, number, epochs)

        def noted(epoch, rsum):
            told = (number, epoch) == (pruned.number, pruned.epochs)
            if told and before_the_report:
                raise KeyboardInterrupt
            with suppress(Pruned) if told else nullcontext():
                after_epoch(epoch, rsum)
            if told:
                raise KeyboardInterrupt

        return noted

    monkeypatch.setattr("xret.heads.tuning.trials._reporting", killed)
    with pytest.raises(KeyboardInterrupt):
        tuned(stores(), tmp_path / "out")
    monkeypatch.undo()
    assert numbers(tuned(stores(), tmp_path / "out").trials) == numbers(whole[1].trials)


def test_a_trial_that_was_killed_before_it_had_its_values_is_drawn_again(stores, whole, tmp_path, monkeypatch):
    original, left = JournalStorage.set_trial_param, [8]  # within the second trial

    def killed(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        original(*arguments)

    monkeypatch.setattr(JournalStorage, "set_trial_param", killed)
    with pytest.raises(KeyboardInterrupt):
        tuned(stores(), tmp_path / "out")
    monkeypatch.undo()
    found = tuned(stores(), tmp_path / "out").trials
    assert [replace(trial, number=0, seconds=0) for trial in found] == [
        replace(trial, number=0, seconds=0) for trial in whole[1].trials
    ]


@given(
    st.lists(st.lists(st.integers(0, 9).map(float), min_size=12, max_size=12), min_size=2, max_size=12),
    st.sampled_from([3, 4, 6, 12]),
)
def test_trials_are_pruned_as_optuna_prunes_them_by_their_best_epoch(trials, epochs):
    theirs = optuna.pruners.SuccessiveHalvingPruner(min_resource=max(1, epochs // 6), reduction_factor=2)
    ended = []
    for pruner in (theirs, Halving(epochs)):
        study = optuna.create_study(direction="maximize", pruner=pruner)
        ended.append([])
        for values in trials:
            trial = study.ask()
            for epoch, value in enumerate(values[:epochs], 1):
                trial.report(max(values[:epoch]) if pruner is theirs else value, epoch)
                pruned = trial.should_prune()
                if epoch == epochs:
                    assert pruner is theirs or not pruned
                elif pruned:
                    break
            study.tell(trial, values[0])
            ended[-1].append(epoch)
    assert ended[0] == ended[1]


def test_the_better_half_goes_on():
    study = optuna.create_study(direction="maximize", pruner=Halving(30))
    gone_on = []
    for values in ((10, 20, 20), (11, 9, 9), (8,), (30, 20, 5), (25, 25, 29)):
        trial = study.ask()
        for epoch, value in zip((5, 10, 20), values, strict=False):
            trial.report(0, epoch - 1)
            assert not trial.should_prune()  # only at a sixth, a third and two thirds
            trial.report(value, epoch)
            if trial.should_prune():
                gone_on.append((trial.number, epoch, False))
                break
            gone_on.append((trial.number, epoch, True))
    # At 5 the best one goes on of 10 and 11, of three, then the best two of four and of five. At 10 the best of 20, 11;
    # then of 20, 11, 30, which the fourth had at 5; then the best two. At 20 the best of 20, 30; of 20, 30, 29.
    assert gone_on == [
        *[(0, 5, True), (0, 10, True), (0, 20, True)],
        *[(1, 5, True), (1, 10, False)],
        (2, 5, False),
        *[(3, 5, True), (3, 10, True), (3, 20, True)],
        *[(4, 5, True), (4, 10, True), (4, 20, False)],
    ]
