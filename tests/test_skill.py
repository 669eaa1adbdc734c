"""The skill for coding agents: its commands run in their order, and each number lies where it says."""

import json
import re
import shlex
from pathlib import Path

from click.testing import CliRunner
from small_checkpoints import save_text_model
from small_runs import make_pictures

from xret.cli import main

SKILL = (Path(__file__).resolve().parents[1] / "skills" / "xret" / "SKILL.md").read_text(encoding="utf-8")
SMALL = [f"--set={key}" for key in ("model.dim=16", "schedule.epochs=1", "data.batch_size=8")]


def test_it_says_what_it_is_and_when_to_take_it():
    name, description = re.match(r"---\nname: (.*)\ndescription: (.*?)\n---\n", SKILL, re.DOTALL).groups()
    assert name == "xret"
    assert "Use to" in description and len(description) < 1024


def test_its_commands_run_in_order_on_a_small_data_set(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    make_pictures(tmp_path, val=12).rename("holiday.yaml")
    clip = save_text_model(tmp_path / "clip", "clip")
    lines = re.findall(r"^(xret .*?) +# (\S+)$", SKILL, re.MULTILINE)
    assert len(lines) >= 12
    for line, path in lines:
        for large, small in (
            ("openai/clip-vit-base-patch32", str(clip)),
            ("--trials 20", "--trials 2"),
            ("--seeds 3", ""),
        ):
            line = line.replace(large, small)
        words = shlex.split(line)
        more = SMALL if words[1] in ("train-head", "ablate", "tune") else []
        done = CliRunner().invoke(main, [*words[1:], *more])
        assert done.exit_code == 0, f"{line}: {done.output}"
        value = json.loads(done.stdout)
        for number, key in re.findall(r"\[(\d+)\]|(\w+)", path):
            value = value[int(number) if number else key]
        assert value is not None, line
