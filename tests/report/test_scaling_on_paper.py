"""What `atoll plan --simulate --json` printed, as a figure and two tables."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from composing import here, tree

from atoll.cluster import plan
from atoll.errors import UserError
from atoll.report import command as report

__all__ = ["here", "tree"]
LUMI = ["facility=lumi", "model=llama2_7b", "nodes=1", "precision=bf16", "facility.account=x"]
LUMI += ["facility.node.file_write_gb_s=1", "training.global_batch_samples=64"]


@pytest.fixture
def scaling(here, capsys):
    assert plan.main([*LUMI, "--simulate=nodes=1,2,...,64", "--json"]) == 0
    file = here / "scaling.json"
    file.write_text(capsys.readouterr().out)
    return file


def test_one_figure_and_two_tables(scaling, capsys):
    assert report.main([str(scaling)]) == 0
    text = capsys.readouterr().out
    assert "Weak scaling: the samples grow" in text and "Strong scaling: the same" in text
    simulated = json.loads(scaling.read_text())
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    knees = [int(row[0]) for row in rows if "by" in row]
    assert knees == [nodes for nodes in simulated["knee"].values() if nodes] != []
    assert "Scaling of llama2_7b on lumi" in scaling.with_suffix(".html").read_text()
    drawn = ElementTree.parse(scaling.with_suffix(".svg")).getroot()
    names = {each.get("data-name") for each in drawn.iter() if each.get("data-name")}
    assert names == {"weak", "strong", "weak, with failures", "strong, with failures"}


def test_another_file_is_refused_in_two_lines(here):
    for text in ("{}", "[1]", "no json", '{"knee": {"weak": 1, "strong": 2}}'):
        (here / "other.json").write_text(text)
        with pytest.raises(UserError, match="holds no simulation"):
            report.main(["other.json"])
    with pytest.raises(UserError, match="holds no simulation"):
        report.main(["nowhere.json"])
