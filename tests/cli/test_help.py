"""Help as a reader sees it, in a narrow and a wide terminal, and completion by the Tab key."""

import pytest
from click import Group, Option
from click.testing import CliRunner

from xret.cli import main


def commands(command=main, words=()):
    """Yield every command, with the words that call it."""
    yield words, command
    if isinstance(command, Group):
        for name, inner in command.commands.items():
            yield from commands(inner, (*words, name))


def help_of(words, option, width):
    result = CliRunner().invoke(main, [*words, option], prog_name="xret", terminal_width=width)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_and_nothing_is_cut_off(width):
    widest = 0
    for words, _ in commands():
        text = help_of(words, "--help", width)
        assert help_of(words, "-h", width) == text
        usage, *lines = text.splitlines()
        assert usage.startswith(f"Usage: {' '.join(('xret', *words))} ")
        assert not [line for line in lines if len(line) > width or line.endswith("...")], words
        assert f"\n  {' '.join(('xret', *words)).strip()}" in text  # an example
        widest = max(widest, *map(len, lines))
    assert widest > width - 10  # a wide terminal is used


def test_the_list_of_commands_has_whole_sentences():
    for words, command in commands():
        if isinstance(command, Group):
            listed = help_of(words, "-h", 80).split("Commands:\n")[1].splitlines()
            assert len(listed) == len(command.commands)
            assert all(line.endswith(".") for line in listed), words


def test_every_option_is_explained():
    for words, command in commands():
        options = [one for one in command.params if isinstance(one, Option)]
        assert all((one.help or "").partition("  [")[0].endswith((".", "…")) for one in options), words


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("xret tr", "train-head"),
        ("xret ablate --bas", "--baseline"),
        ("xret list si", "similarities"),
        ("xret cache ve", "verify"),
    ],
)
def test_tab_completes(typed, found):
    line = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    result = CliRunner().invoke(main, [], prog_name="xret", env={"_XRET_COMPLETE": "bash_complete", **line})
    assert result.stdout == f"plain,{found}\n"
