"""Files as people have them: line ends, tabs, marks, other alphabets, comments, long lines."""

from __future__ import annotations

import linecache
import warnings
from pathlib import Path

import pytest
import torch
from repairing import build, changed, load, repaired, write

from duoka.checker.fix import Repairs

X = {"x": torch.linspace(-1, 1, 12).view(3, 4)}
TEXT = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        h = self.b(self.a(x))
        {line}
        return h
"""


def repair_text(folder: Path, text: str) -> Repairs:
    model = build(load(write(folder, text)).Model)
    repairs: Repairs = repaired(model, {"a": 0, "b": 1}, X)[1]
    assert repairs.proved, [patch.reason for patch in repairs]
    return repairs


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("ä, 多卡 = 'ä卡', x; h = h + 多卡", "ä, 多卡 = 'ä卡', x; h = h + 多卡.to(h.device)"),
        ("h = h+x # why?  x", "h = h+x.to(h.device) # why?  x"),
        ("h = h + ( x )", "h = h + ( x ).to(h.device)"),
        ("h = (h + x) + (x+h)", "h = (h + x.to(h.device)) + (x.to(h.device)+h)"),
        ("h = h + x if True else h - x", "h = h + x.to(h.device) if True else h - x"),
        ("h = h + [x][0]", "h = h + [x][0].to(h.device)"),
        ("h = h + (lambda: x)()", "h = h + (lambda: x)().to(h.device)"),
        ("h = h + {'k': x}['k']", "h = h + {'k': x}['k'].to(h.device)"),
        ("h = h ** x ** 2", "h = h ** (x ** 2).to(h.device)"),
        ("h = h + -x", "h = h + (-x).to(h.device)"),
        ("h = h + (not_it := x)", "h = h + (not_it := x).to(h.device)"),
        ("h = h + x; h = h * x  # two", "h = h + x.to(h.device); h = h * x.to(h.device)  # two"),
        ("h = torch.add(h, alpha=2, other=x)", "h = torch.add(h, alpha=2, other=x.to(h.device))"),
        ("f = lambda: (lambda y: y + x)(h); f()",
         "f = lambda: (lambda y: y + x.to(y.device))(h); f()"),
        ("h = h + x.to('cuda:0', torch.float32)", "h = h + x.to(h.device, torch.float32)"),
        ("h = h + x.to(device='cuda:0')", "h = h + x.to(device=h.device)"),
        ("h = h + x.to(torch.float32)", "h = h + x.to(torch.float32).to(h.device)"),
        ("h = h + x.cpu()", "h = h + x.to(h.device)"),
        ("h -= x", "h -= x.to(h.device)"),
        ("h = h + x[:, :]", "h = h + x[:, :].to(h.device)"),
        ("h = h + x if h is not None else h", "h = h + x.to(h.device) if h is not None else h"),
    ],
)  # fmt: skip
def test_one_line(line: str, wanted: str, tmp_path: Path) -> None:
    assert changed(repair_text(tmp_path, TEXT.format(line=line))) == [wanted]


def test_windows_line_ends_stay(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    text = TEXT.format(line="h = h + x  # sum")
    path.write_bytes(("import torch\nfrom torch import nn\n" + text).replace("\n", "\r\n").encode())
    [patch] = repaired(build(load(path).Model), {"a": 0, "b": 1}, X)[1]
    assert patch.proved
    assert patch.after == patch.before.replace("h + x ", "h + x.to(h.device) ")
    assert "\r\n" in patch.after
    assert patch.after.count("\n") == patch.after.count("\r\n")


def test_a_line_before_has_the_files_line_end_and_tabs(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    text = TEXT.format(line="# what it does\n        h = self.mix(h) + self.mix(self.a(x))")
    text += "\n    def mix(self, h):\n        return h.relu()\n"
    text = ("import torch\nfrom torch import nn\n" + text).replace("    ", "\t")
    path.write_bytes(text.replace("\n", "\r\n").encode())
    [patch] = repaired(build(load(path).Model), {"a": 0, "b": 1}, X)[1]
    assert patch.proved, patch.reason
    assert patch.after.count("\n") == patch.after.count("\r\n")
    assert (
        "\t\t# what it does\r\n\t\tmix_output = self.mix(h)\r\n"
        "\t\tmix_output1 = self.mix(self.a(x))\r\n"
        "\t\th = mix_output.to(mix_output1.device) + mix_output1\r\n"
    ) in patch.after


def test_a_mark_at_the_beginning_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    text = "\ufefffrom torch import nn\n" + TEXT.format(line="h = h + x")
    path.write_text(text, encoding="utf-8")
    [patch] = repaired(build(load(path).Model), {"a": 0, "b": 1}, X)[1]
    assert patch.proved, patch.reason
    assert patch.after == text.replace("h + x", "h + x.to(h.device)")


def test_calls_of_several_lines_keep_their_form(tmp_path: Path) -> None:
    text = TEXT.format(
        line="""h = torch.cat(
            [
                h,  # the first
                x,
            ],  # both
            dim=0,
        )
        h = h + torch.ones(
            4,  # four
        )
        h = h + torch.full((4,),
                           2.0)"""
    )
    [patch] = repair_text(tmp_path, text)
    wanted = patch.before.replace("  x,\n", "  x.to(h.device),\n")
    wanted = wanted.replace("            4,  # four\n", "            4, device=h.device,  # four\n")
    wanted = wanted.replace("2.0)", "2.0, device=h.device)")
    assert patch.after == wanted


def test_what_python_warns_of_is_left_alone(tmp_path: Path) -> None:
    line = "s = '\\d' is 'd'; h = h + x"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = load(write(tmp_path, TEXT.format(line=line)))
    repairs: Repairs = repaired(build(module.Model), {"a": 0, "b": 1}, X)[1]
    assert repairs.proved, [patch.reason for patch in repairs]
    assert changed(repairs) == [line.replace("h + x", "h + x.to(h.device)")]


def test_a_patched_file_needs_no_repair(tmp_path: Path) -> None:
    [patch] = repair_text(tmp_path, TEXT.format(line="h = h + x"))
    path = tmp_path / "again.py"
    path.write_text(patch.after, encoding="utf-8")
    report, repairs = repaired(build(load(path).Model), {"a": 0, "b": 1}, X)
    assert report.ok
    assert not repairs
    assert repairs.proved


def test_nothing_of_the_users_is_changed(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT.format(line="h = h + x; self.a(x) + self.t"))
    text = path.read_text().replace(
        "nn.Linear(4, 4)\n\n", "nn.Linear(4, 4)\n        self.t = torch.ones(4)\n\n"
    )
    path.write_text(text)
    module = load(path)
    model = build(module.Model)
    code, attributes = module.Model.forward.__code__, list(vars(model).items())
    linecache.getlines(str(path))
    lines = linecache.cache[str(path)]
    repairs: Repairs = repaired(model, {"": 0, "b": 1}, X)[1]
    assert repairs.proved
    assert module.Model.forward.__code__ is code
    assert list(vars(model).items()) == attributes
    assert linecache.cache[str(path)] == lines
    assert path.read_text() == text
