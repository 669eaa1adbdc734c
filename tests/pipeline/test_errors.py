"""Messages name options to who types commands, and arguments to who calls functions."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from click import command
from click.testing import CliRunner

from xret.cli import Commands
from xret.pipeline.errors import RunError, SampleError

TEXTS = {
    "it exists; take another --out, or resume with --resume": "it exists; take another `out`, or resume with `resume`",
    "leave --data-root and --set out": "leave `data_root` and `settings` out",
    "give --encoder hf:DIR, or --features IMAGE,TEXT": "give `encoder=hf:DIR`, or `features=IMAGE,TEXT`",
    "give --space KEY=LOW:HIGH": "give `space` KEY=LOW:HIGH",
    "run `xret extract … --store a--b`; a--b is no store": "run `xret extract … --store a--b`; a--b is no store",
}


@pytest.mark.parametrize(("typed", "called"), TEXTS.items())
def test_options_are_arguments_where_no_command_runs(typed, called):
    assert str(RunError(typed)) == called
    assert str(SampleError("1.jpg", typed)) == f"1.jpg: {called}"

    @command()
    def refuse():
        with ThreadPoolExecutor(1) as pool:  # as trainings that are stacked
            raise RunError(pool.submit(str, RunError(typed)).result())

    group = Commands(commands={"refuse": refuse})
    assert CliRunner().invoke(group, ["refuse"]).stderr == f"Error: {typed}\n"
    assert str(RunError(typed)) == called
