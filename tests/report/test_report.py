"""`python -m tilepipe.report DIR` writes a page and a Markdown file, or says why not."""

import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report.made_up import Store, fused_times, launch_of
from tilepipe.records import Status
from tilepipe.report.__main__ import main
from tilepipe.report.content import report_of
from tilepipe.report.markdown import markdown_of
from tilepipe.report.page import page_of
from tilepipe.report.points import find_points
from tilepipe.report.shapes import LineFigure
from tilepipe.report.writing import figures_of
from tilepipe.validate import validate

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "results" / "h200_x1"


class Links(HTMLParser):
    """Everything that a browser would fetch, anchors, ids and how tags nest."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self):
        super().__init__()
        self.fetched, self.anchors, self.ids, self.open = [], [], [], []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        for key in ("src", "href", "xlink:href", "data", "poster", "srcset", "action"):
            if key in found:
                (self.anchors if tag in ("a", "use") else self.fetched).append(found[key])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(path):
    links = Links()
    links.feed(path.read_text(encoding="utf-8"))
    assert links.open == []
    return links


def test_every_kind_of_figure_and_table_is_there(full_report):
    cuda, host = full_report.sections

    assert [section.title for section in (cuda, host)] == [
        "Executor cuda: NVIDIA H200",
        "Executor host: Some CPU",
    ]
    titles = [part.title for part in cuda.parts]
    assert titles == [
        "dispatch: bandwidth against communication CTAs",
        "combine: bandwidth against communication CTAs",
        "dispatch → GEMM: fused against unfused",
        "dispatch → GEMM: breakdown",
        "GEMM → combine: fused against unfused",
        "GEMM → combine: breakdown",
        "whole layer: fused against unfused",
        "whole layer: breakdown",
        "grouped GEMM against its peers",
        "whole layer: beside torch",
        "time and imbalance by routing law",
        "by kernel.order: order of sends",
        "by kernel.granularity: granularity of flags",
        "by kernel.flag_batch: rows a release fence",
        "by kernel.num_loads: depth of copy simt",
        "by kernel.num_stages: depth of copy tma",
        "timeline of a launch",
    ]
    assert [part.title for part in host.parts] == [*titles[2:13], "timeline of a launch"]
    assert full_report.missing == ()
    assert full_report.warnings == ()


def test_the_page_needs_nothing_beside_it(written):
    links = parsed(written / "report.html")

    assert links.fetched == ["data:,"]
    assert links.anchors
    assert all(anchor.startswith("#") for anchor in links.anchors)
    assert {anchor[1:] for anchor in links.anchors} <= set(links.ids)
    assert len(set(links.ids)) == len(links.ids)
    text = (written / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)|<script|<iframe", text)


def test_the_contents_lead_to_every_section_and_to_every_part_of_it(written, full_report):
    text = (written / "report.html").read_text(encoding="utf-8")

    places = dict(re.findall(r'<h[23] id="([^"]*)">(.*?)</h[23]>', text))
    (contents,) = re.findall(r"<nav.*?</nav>", text, re.DOTALL)
    assert re.findall(r'<a href="#([^"]*)">', contents) == list(places)
    named = [unescape(title) for _, title in re.findall(r'<a href="#([^"]*)">(.*?)</a>', contents)]
    parts = [part.title for section in full_report.sections for part in section.parts]
    assert [title for title in named if title in parts] == parts


def test_the_markdown_names_figures_that_lie_beside_it(written, full_report):
    text = (written / "report.md").read_text(encoding="utf-8")

    named = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)

    assert named == [f"figures/{figure.slug}.svg" for figure in figures_of(full_report)]
    assert {path.name for path in (written / "figures").iterdir()} == {
        Path(name).name for name in named
    }
    for name in named:
        assert (written / name).read_text(encoding="utf-8").startswith("<svg ")


def test_markdown_tables_have_one_width_whatever_their_cells_hold(written):
    text = (written / "report.md").read_text(encoding="utf-8")

    assert "no GPU \\| here \\*now\\*" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block


def test_two_reports_of_the_same_points_are_equal(store):
    for order in ("edf", "token"):
        for num_ctas in (8, 16):
            kernel = {"order": order, "num_comm_ctas": num_ctas}
            store.add(fused_times(), operation="dispatch_gemm", kernel=kernel)
    reports = []
    for _ in range(2):
        main([str(store.root)])
        paths = sorted((store.root / "report").rglob("*"))
        reports.append({path: path.read_bytes() for path in paths if path.is_file()})

    assert len(reports[0]) == 4
    assert reports[0] == reports[1]


def test_points_that_are_not_ok_are_listed_with_their_reason(written):
    text = (written / "report.html").read_text(encoding="utf-8")

    assert "Points that are not ok" in text
    assert "rank 1: 3 of 8 values are wrong: token 5, column 7" in text


def test_the_published_results_make_a_report_by_themselves(tmp_path, capsys):
    code = main([str(PUBLISHED), f"out={tmp_path / 'report'}"])

    assert code == 0
    assert "100 points, 22 figures, 9 warnings" in capsys.readouterr().out
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    # Some copies of the tree had changes; those with new files beside the sources had none.
    assert "commit 5954df2d, commit b0bcae5d with uncommitted changes" in text
    # As results/README.md has them, in GB/s of payload.
    assert "| 4096 | tma | 48 | 235 (233 to 235) | 2\u202f001 | 4\u202f001 | 0.834 | 41.7 |" in text


def test_it_writes_below_the_results_folder_and_validate_passes_it_over(store, capsys):
    store.add({"dispatch": launch_of(10, 100)})

    code = main([str(store.root)])

    assert code == 0
    assert (store.root / "report" / "report.html").is_file()
    assert str(store.root / "report" / "report.html") in capsys.readouterr().out
    assert validate(store.root).faults == []


def test_a_second_report_drops_figures_that_it_no_longer_has(store):
    folders = [
        store.add({"dispatch": launch_of(10, 100)}, kernel={"num_comm_ctas": n}) for n in (8, 16)
    ]
    main([str(store.root)])
    figures = store.root / "report" / "figures"
    assert [path.name for path in figures.iterdir()] == ["cuda-dispatch-bandwidth-1.svg"]
    (figures / "mine.svg").write_text("kept")
    shutil.rmtree(folders[0])

    main([str(store.root)])

    assert [path.name for path in figures.iterdir()] == ["mine.svg"]


def test_only_failed_points_still_make_a_report(store, capsys):
    store.add(status=Status.unsupported, reason="no code for it")

    code = main([str(store.root)])

    assert code == 0
    assert "1 points, 0 figures" in capsys.readouterr().out
    text = (store.root / "report" / "report.md").read_text(encoding="utf-8")
    assert "1 point: 1 unsupported." in text
    assert "no code for it" in text
    assert "executor cuda: no point ended ok; every figure of it needs an NVIDIA GPU" in text
    assert "executor host: no point ended ok; needs no GPU" in text


def test_what_is_missing_is_named_with_the_experiment_that_gives_it(store):
    store.add({"dispatch": launch_of(10, 100)}, executor="host")

    report = report_of(find_points(store.root), title="x")

    assert report.missing[0].startswith("executor cuda: no point ended ok")
    assert (
        "executor host, by kernel.order: order of sends: needs two or more values of kernel.order: "
        "python -m tilepipe.run +experiment=dispatch_gemm_order" in report.missing
    )
    assert (
        "executor host, timeline of a launch: needs a recorded launch: python -m tilepipe.run "
        "+experiment=dispatch_gemm measure.timeline=true" in report.missing
    )
    # What the host cannot have is not asked of it, but of the hardware that has it.
    assert not any("CTAs" in line for line in report.missing if line.startswith("executor host"))
    assert (
        "executor cuda, dispatch: bandwidth against communication CTAs: needs an NVIDIA GPU "
        "(H100, H200) and two or more values of kernel.num_comm_ctas: "
        "python -m tilepipe.run +experiment=dispatch" in report.missing
    )


def test_a_copy_or_a_link_that_no_figure_has_is_named_with_the_hardware_for_it(store):
    for num_ctas in (8, 16):
        store.add({"dispatch": launch_of(10, 100)}, kernel={"num_comm_ctas": num_ctas})

    missing = report_of(find_points(store.root), title="x").missing

    assert (
        "executor cuda, dispatch: bandwidth of copy tma: needs an NVIDIA GPU (H100, H200): "
        "python -m tilepipe.run +experiment=dispatch kernel.copy=tma" in missing
    )
    assert not any("copy simt: needs" in line and "bandwidth" in line for line in missing)
    assert (
        "executor cuda, dispatch: bandwidth of wire_bytes against the link: needs two or more "
        "NVIDIA GPUs of one host: python -m tilepipe.run +experiment=dispatch" in missing
    )


def test_a_machine_of_which_nothing_can_be_drawn_has_no_empty_section(store):
    store.add({"dispatch": launch_of(10, 100)})

    report = report_of(find_points(store.root), title="x")

    assert report.sections == ()
    assert report.overview.rows[0][1] == "NVIDIA H200"


def test_no_rate_is_above_a_peak_without_its_byte_basis_or_a_warning(full_report):
    """Every figure whose table has a rate above the link or its own limit says why."""
    for figure in figures_of(full_report):
        if not isinstance(figure, LineFigure):
            continue
        assert figure.y_label.endswith(("_bytes", "bytes read and written"))
        (limit,) = (level.value for level in figure.levels)
        assert max(value.value for line in figure.lines for value in line.y) <= limit
        column = figure.numbers.head.index("GB/s logical")
        rates = [float(row[column].replace("\u202f", "")) for row in figure.numbers.rows]
        said = "Logical rates count a row once for each of its experts" in figure.caption
        assert said == (max(rates) > 450)


def test_a_broken_point_is_named_and_the_rest_reported(store, capsys):
    broken = store.add({"dispatch": launch_of(10, 100)})
    store.add({"dispatch": launch_of(10, 100)}, kernel={"order": "token"})
    (broken / "samples.parquet").write_bytes(b"PAR1 and then nothing")

    code = main([str(store.root)])

    out, err = capsys.readouterr()
    assert code == 1
    assert "samples.parquet: cannot be read" in err
    assert ", 1 faults\nreport: " in out
    text = (store.root / "report" / "report.html").read_text(encoding="utf-8")
    assert "Could not be read" in text
    assert "samples.parquet: cannot be read" in text


def test_a_rate_above_the_link_is_a_warning_on_the_screen_and_in_both_files(store, capsys):
    store.add({"dispatch": launch_of(10, 100)}, num_ranks=2, counts={"wire_bytes": 100_000})

    main([str(store.root)])

    said = "500 GB/s of wire_bytes are more than the link's 450 GB/s"
    out = capsys.readouterr().out
    assert f"warning: dispatch, dispatch: {said}" in out
    assert out.isascii()
    for name, mark in (("report.html", 'class="warning"'), ("report.md", "**Warning:**")):
        text = (store.root / "report" / name).read_text(encoding="utf-8")
        assert said in unescape(text)
        assert mark in text


@pytest.mark.parametrize("executor", ["cuda", "host"])
def test_text_from_points_is_never_markup(tmp_path, executor):
    store = Store(tmp_path)
    reason = "<script>alert(1)</script> & <b>"
    store.add(status=Status.runtime_error, reason=reason, executor=executor)
    report = report_of(find_points(store.root), title="<i>")

    page = page_of(report, {})
    text = markdown_of(report)

    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &lt;b&gt;" in page
    assert "\\<script\\>" in text


def test_an_empty_folder_is_refused(tmp_path, capsys):
    code = main([str(tmp_path)])

    assert code == 1
    assert capsys.readouterr().err == (
        f"{tmp_path}: holds no points: name a folder in which points have run\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_broken_points_only_is_refused_with_every_fault(store, capsys):
    folder = store.add({"dispatch": launch_of(10, 100)})
    (folder / "point.json").write_text("{")

    code = main([str(store.root)])

    out, err = capsys.readouterr()
    assert code == 1
    assert out == ""
    assert err.startswith(f"{folder}/point.json: cannot be read: ")
    assert err.count("\n") == 1


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    code = main([str(tmp_path / "gone")])

    assert code == 2
    assert capsys.readouterr().err == (
        f"{tmp_path / 'gone'}: no such folder: name a results folder, as in outputs\n"
    )


def test_a_point_s_own_folder_stays_as_it_is(store, tmp_path, capsys):
    folder = store.add({"dispatch": launch_of(10, 100)})

    code = main([str(folder)])

    assert code == 2
    assert "a point's own folder takes no report: name another place with out=" in (
        capsys.readouterr().err
    )
    assert main([str(folder), f"out={tmp_path / 'r'}"]) == 0
    assert validate(store.root).faults == []


@pytest.mark.parametrize(
    ("word", "said"),
    [("out=", "out=: names no folder: write out=FOLDER"), ("x", "x: not understood: write out=x")],
)
def test_a_word_that_is_no_place_is_refused(store, capsys, word, said):
    store.add({"dispatch": launch_of(10, 100)})

    code = main([str(store.root), word])

    assert code == 2
    assert capsys.readouterr().err == f"{said}\n"


def test_a_place_that_cannot_be_written_is_refused(store, tmp_path, capsys):
    store.add({"dispatch": launch_of(10, 100)})
    (tmp_path / "file").write_text("")

    code = main([str(store.root), f"out={tmp_path / 'file' / 'report'}"])

    assert code == 1
    assert capsys.readouterr().err == (
        f"{tmp_path / 'file' / 'report'}: Not a directory: "
        "name a folder that can be written with out=FOLDER\n"
    )


def test_without_matplotlib_the_next_step_is_named(store):
    store.add({"dispatch": launch_of(10, 100)})
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from tilepipe.report.__main__ import main\n"
        f"sys.exit(main([{str(store.root)!r}]))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert done.stderr == ("matplotlib is missing: pip install 'tilepipe[plot]', then try again\n")


def test_the_command_loads_neither_torch_nor_hydra(store):
    store.add({"dispatch": launch_of(10, 100)})
    code = (
        "import sys\nfrom tilepipe.report.__main__ import main\n"
        f"assert main([{str(store.root)!r}]) == 0\n"
        "print([n for n in ('torch', 'cutlass', 'hydra', 'omegaconf') if n in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines()[-1] == "[]"
