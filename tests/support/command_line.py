"""Commands as a user types them, within this process."""

from click.testing import CliRunner, Result

from xret.cli import main


def run(*words: object, code: int = 0) -> Result:
    """Run a command and expect this exit code; return what it printed."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    return result


def refused(*words: object, code: int = 1) -> str:
    """Return the sentence that a wrong command ends in."""
    result = run(*words, code=code)
    *_, last = result.stderr.strip().splitlines()
    assert "Traceback" not in result.stderr
    assert last.startswith("Error: ")
    return last.removeprefix("Error: ")
