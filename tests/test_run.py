"""The command line: what is composed, what is said first, how mistakes leave."""

import errno
import os
import re
import resource
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

from tilepipe import run
from tilepipe.config import detect
from tilepipe.config.checks import check_config
from tilepipe.config.schemas import config_from_dict


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Run the entry in this process with a driver that only keeps its points."""
    kept = []
    driver = types.ModuleType("tilepipe.launch.driver")

    def run_points(points, *, results_dir, announcement):
        sys.stdout.write(announcement + "\n")
        kept.extend(points)
        kept.append(results_dir)
        return 7

    driver.run_points = run_points
    monkeypatch.setitem(sys.modules, "tilepipe.launch.driver", driver)
    monkeypatch.setattr(detect, "gpu_names", lambda: ())
    monkeypatch.chdir(tmp_path)

    def typed(*words):
        kept.clear()
        monkeypatch.setattr(sys, "argv", ["run.py", *words])
        return run.main(), kept[:-1], kept[-1] if kept else None

    return typed


def test_the_driver_gets_all_points_and_its_exit_code_is_returned(command, capsys, tmp_path):
    code, points, results_dir = command("+experiment=dispatch_gemm", "results_dir=here")

    first_line, *rest = capsys.readouterr().out.splitlines()
    swept = [(p.config["workload"]["num_tokens"], p.config["kernel"]["order"]) for p in points]
    assert code == 7
    assert len(points) == len({point.config_id for point in points}) == 8
    assert sorted(set(swept)) == [(64, "edf"), (64, "random"), (256, "edf"), (256, "random")]
    assert str(results_dir) == "here"
    assert {(point.executor, point.operation) for point in points} == {("host", "dispatch_gemm")}
    assert "8 points of dispatch_gemm for hardware=cpu; no GPU found" in first_line
    assert first_line.endswith("host executor: workload deepseek_v3_small")
    assert rest == []
    # Neither Hydra's folders and logs nor its scratch folder are left.
    assert list(tmp_path.iterdir()) == []


def test_the_words_of_a_point_compose_it_again_alone(command, tmp_path):
    trace = tmp_path / "a trace, of ours.npy"
    trace.write_bytes(b"rows")
    path = str(trace).replace(" ", r"\ ").replace(",", r"\,")
    words = ("+experiment=gemm_combine", "routing=trace", f"routing.path={path}")

    _, points, _ = command(*words, "kernel.order=random,token")
    repeated = [command(*point.overrides)[1] for point in points]

    assert points[0].config["routing"]["path"] == str(trace)
    assert [point.config["kernel"]["order"] for point in points] == ["random", "token"]
    assert [[again.config for again in one] for one in repeated] == [[p.config] for p in points]
    assert [one[0].folder for one in repeated] == [point.folder for point in points]


def test_a_trace_makes_one_point_of_an_experiment(command):
    words = "+experiment=dispatch_gemm workload=qwen15_moe measure=quick routing=trace"

    _, points, _ = command(
        *words.split(), "routing.path=F", "routing.layer=12", "launch.num_ranks=4"
    )

    (point,) = points
    config = config_from_dict(point.config)
    check_config(config)
    assert (config.workload.num_tokens, config.routing.layer) == (None, 12)


def test_a_bad_point_reaches_the_driver_with_the_good_ones(command):
    _, points, _ = command("workload.num_topk=2,99")

    check_config(config_from_dict(points[0].config))
    with pytest.raises(ValueError, match=r"workload\.num_topk=99: must be at most"):
        check_config(config_from_dict(points[1].config))


def test_a_comma_list_sweeps_without_being_told_to(command):
    _, points, _ = command("kernel.order=edf,token", "workload.num_tokens=1,2")

    assert len(points) == 4
    assert points[0].choices["hardware"] == "auto"
    assert not any(group.startswith("hydra") for group in points[0].choices)


def test_hardware_that_is_typed_is_not_said_to_be_missing(command, capsys):
    command("hardware=cpu")
    on_host = capsys.readouterr().out
    command("hardware=h200_x8", "kernel=dispatch")
    on_gpus = capsys.readouterr().out

    assert "; composed for the host executor: workload tiny" in on_host
    assert "1 point of typed_dispatch for hardware=h200_x8\n" in on_gpus


@pytest.mark.parametrize("size", ["size=8k", "nr_inodes=2"])
def test_a_temporary_folder_without_room_is_one_sentence(size, tmp_path, mounted, monkeypatch):
    folder = mounted(f"1m,{size}")
    if size == "size=8k":
        (folder / "filler").write_bytes(bytes(4096))

    done = subprocess.run(
        [sys.executable, "-m", "tilepipe.run", "hardware=cpu", "workload=tiny", "dry_run=true"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "TMPDIR: No space left on device: set it to a folder that can be written and has some "
        "room\n"
    )


def test_without_any_temporary_folder_there_is_one_sentence(command, capsys, monkeypatch):
    def nowhere():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)

    code, points, _ = command("workload=tiny")

    assert (code, points) == (2, [])
    assert capsys.readouterr().err == (
        "TMPDIR: No usable temporary directory found in ['/tmp']: set it to a folder that can be "
        "written and has some room\n"
    )


def test_an_experiment_on_paced_links_says_that_the_host_has_none(command, capsys):
    command("+experiment=dispatch_gemm_paced", "hardware=cpu")
    paced = capsys.readouterr().out
    command("+experiment=dispatch_gemm", "hardware=cpu")

    assert "workload deepseek_v3_small; no link is throttled there\n" in paced
    assert "throttled" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "kernel.tile_mm=3",
            r"kernel\.tile_mm=3: unknown key; kernel has .*; did you mean kernel\.tile_m\?",
        ),
        ("foo=3", r"foo=3: unknown key; the root has name, .*, launch; type one of them"),
        ("hydra.foo=1", r"Could not override 'hydra\.foo'; Key 'foo' not in 'HydraConf'"),
        # Beside a comma list Hydra would speak of an ambiguous value instead.
        (
            "kernel.tile_m=abc kernel.order=edf,random",
            r"kernel\.tile_m=abc: must be a whole number",
        ),
        ("measure.interval=x", r"measure\.interval=x: must be a number or null"),
        ("dry_run=perhaps", "dry_run=perhaps: must be true or false"),
        ("launch.num_ranks=null", r"launch\.num_ranks=null: must be a whole number"),
        (
            "kernel.order=edf,edff",
            r"kernel\.order=edff: must be one of edf, edf_list, expert, token, random; "
            r"did you mean kernel\.order=edf\?",
        ),
        ("kernel.order=[edf]", r"kernel\.order=\[edf\]: must be one of edf, .*order=edf\?"),
        (
            "measure.baselines=torch",
            r"measure\.baselines=torch: must be a list in brackets, each one of torch, deepep; "
            r"did you mean measure\.baselines=\[torch\]\?",
        ),
        ("measure.baselines=[nope]", r"measure\.baselines=\[nope\]: must be a list in .*"),
        (
            "kernel=dispatch_gem",
            "kernel=dispatch_gem: no such option; there are combine, .*, moe_layer; "
            r"did you mean kernel=dispatch_gemm\?",
        ),
        ("+experiment=nope", r"\+experiment=nope: no such option; there are combine, .* of them"),
        (
            "experiment=dispatch",
            r"experiment=dispatch: nothing to replace; type \+experiment=.*",
        ),
        (
            "workload.num_tokenz=1,2 +experiment=dispatch",
            r"workload\.num_tokenz=1,2: unknown key; .*; did you mean workload\.num_tokens\?",
        ),
        ("foo", "foo: not understood; type key=value, .*"),
        ("kernel.order='", r"kernel\.order=': not understood; type key=value, .*"),
        ("workload.num_tokens=range(1,x)", r"workload\.num_tokens=range\(1,x\): not und.*"),
        ("~kernel", "~kernel: a key or group cannot be removed; leave the word out"),
        ("~kernel.order", r"~kernel\.order: a key or group cannot be removed; leave the word out"),
        ("~foo", "~foo: a key or group cannot be removed; leave the word out"),
        ("+kernel.order=edf", r"\+kernel\.order=edf: .* already; type kernel\.order=edf"),
        (
            "+kernel.foo=3",
            r"kernel\.foo=3: unknown key; kernel has operation, .*; type one of them",
        ),
        ("++kernel.ordr=edf", r"kernel\.ordr=edf: unknown key; .*; did you mean kernel\.order\?"),
        ("+foo=3", "foo=3: unknown key; the root has name, .*; type one of them"),
        (
            "kernel.order.foo=3",
            r"kernel\.order\.foo=3: unknown key; kernel\.order has no keys of its own; "
            "type kernel.order=VALUE",
        ),
        (
            "measure.baselines.foo=1",
            r"measure\.baselines\.foo=1: unknown key; measure\.baselines has no keys .*",
        ),
        (
            "kernel=dispatch kernel={a:1}",
            r"kernel={a:1}: kernel\.a: unknown key; kernel has operation, .*; type one of them",
        ),
        ("kernel=[a]", r"kernel=\[a\]: takes the name of one option; type kernel=NAME, or .*"),
        ("kernel=null", "kernel=null: takes the name of one option; type kernel=NAME, or .*"),
        ("measure.baselines=[torch", r"measure\.baselines=\[torch: not understood; type .*"),
        (
            "workload.hidden=???",
            r"workload\.hidden=\?\?\?: \?\?\? stands for a value that is not typed; type one, .*",
        ),
        (
            "workload.hidden=${workload.hidden}",
            r"workload\.hidden=\${workload\.hidden}: the value in braces leads back to this key; "
            "type a whole number",
        ),
        (
            "hardware=h200_x2 kernel=gemm_combine kernel.num_chunks=${foo.bar}",
            r"kernel\.num_chunks=\${foo\.bar}: there is no key foo\.bar; "
            "type a whole number or null",
        ),
        (
            "hardware=h200_x2 kernel=gemm_combine kernel.num_chunks=${tilepipe.nope:1}",
            r"kernel\.num_chunks=\${tilepipe\.nope:1}: there is no function tilepipe\.nope; "
            "type a whole number or null",
        ),
        (
            "kernel.num_comm_ctas=1.5",
            r"kernel\.num_comm_ctas=1\.5: must be a whole number or auto or null",
        ),
        ("--config-dir /nowhere", "--config-dir /nowhere: no such folder; name one that holds .*"),
        ("-cn nope", "--config-name nope: no such file; leave it out, .*"),
        (
            "workload.num_tokens=interval(0,8)",
            r"workload\.num_tokens=interval\(0,8\): an interval holds no list of values; type .*",
        ),
        (
            "workload.num_tokens=range(5,0)",
            r"workload\.num_tokens=range\(5,0\): no value is left, so there is nothing to run; .*",
        ),
        (
            "kernel=glob(foo*) dry_run=true",
            r"kernel=glob\(foo\*\): no option matches, so there is nothing to run; type kernel=a,b",
        ),
        # Asked to show something, too.
        ("--help kernel.rolez=1", r"kernel\.rolez=1: unknown key; kernel has .*"),
        ("--help hardware=nope", "hardware=nope: no such option; there are auto, .*"),
        ("--cfg job --multirun", "--multirun --cfg: one of them at a time; leave --cfg out"),
        (
            "--cfg job kernel.order=edf,random",
            r"kernel\.order=edf,random: with --cfg, --info or --run there is one point; .*",
        ),
    ],
)
def test_a_mistyped_word_ends_with_one_sentence_and_code_two(words, said, command, capsys):
    code, points, _ = command(*words.split())

    assert (code, points) == (2, [])
    assert re.fullmatch(f"{said}\n", capsys.readouterr().err)


def test_hydras_own_account_is_there_for_those_who_ask(command, capsys, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    with pytest.raises(Exception, match="tile_mm"):
        command("kernel.tile_mm=3")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("kernel: [", r".*Error: .*own\.yaml.*"),
        (
            "kernel:\n  tile_m: abc",
            r"experiment/own\.yaml: kernel\.tile_m=abc: must be a whole n.*",
        ),
        ("kernel:\n  tilem: 3", r".*own.*tilem.*"),
        ("defaults:\n  - override /kernel: nix", "kernel=nix: no such option; there are .*"),
    ],
)
def test_a_wrong_file_of_the_user_is_told_in_a_sentence(command, capsys, tmp_path, content, said):
    own = tmp_path / "conf" / "experiment" / "own.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(f"# @package _global_\n{content}\n")

    code, points, _ = command("--config-dir", str(own.parent.parent), "+experiment=own")

    assert (code, points) == (2, [])
    assert re.fullmatch(f"{said}\n", capsys.readouterr().err)


def test_cfg_job_runs_nothing_and_imports_no_gpu_stack(tmp_path):
    probe = (
        "import sys; sys.argv = ['run.py', '--cfg', 'job', '+experiment=combine']\n"
        "from tilepipe.run import main\n"
        "code = main()\n"
        "print('code', code, [m for m in ('torch', 'cutlass', 'pyarrow') if m in sys.modules])\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(run.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.startswith("name: combine\n")
    assert done.stdout.endswith("code 0 []\n")
    assert list(tmp_path.iterdir()) == []


def test_words_of_the_sweep_are_no_part_of_a_point(command):
    _, points, _ = command("workload=tiny", "dry_run=true", "resume=any", "repetitions=3")
    _, plain, _ = command("workload=tiny")

    assert points[0].overrides == plain[0].overrides == ("workload=tiny",)
    assert points[0].folder == plain[0].folder


@pytest.mark.parametrize("typed", ["[dispatch,combine]", "dispatch,combine"])
def test_two_experiments_are_not_made_one_sweep(command, capsys, typed):
    code, points, _ = command(f"+experiment={typed}")

    assert (code, points) == (2, [])
    assert capsys.readouterr().err == (
        "experiment=combine,dispatch: each has a kernel and a sweep of its own; start one after "
        "the other\n"
    )


def test_a_file_without_a_name_lies_over_an_experiment(command, tmp_path):
    over = tmp_path / "conf" / "experiment" / "over.yaml"
    over.parent.mkdir(parents=True)
    over.write_text("# @package _global_\nkernel:\n  tile_m: 64\n")
    words = ("--config-dir", str(over.parent.parent), "+experiment=[dispatch_gemm_order,over]")

    _, points, _ = command(*words)
    _, again, _ = command(*points[0].overrides)

    assert {point.name for point in points} == {"dispatch_gemm_order"}
    assert {point.config["kernel"]["tile_m"] for point in points} == {64}
    assert len({point.config["kernel"]["order"] for point in points}) == 5
    assert [point.folder for point in again] == [points[0].folder]


def test_an_experiment_without_its_package_line_is_told_what_it_lacks(command, tmp_path, capsys):
    bare = tmp_path / "conf" / "experiment" / "bare.yaml"
    bare.parent.mkdir(parents=True)
    bare.write_text("kernel:\n  order: random\n")

    code, points, _ = command("--config-dir", str(bare.parent.parent), "+experiment=bare")

    assert (code, points) == (2, [])
    assert capsys.readouterr().err == (
        f"{bare}: the first line of an experiment must be # @package _global_; put it there\n"
    )


def test_experiments_of_the_user_are_found_in_a_config_dir(command, tmp_path):
    mine = tmp_path / "conf" / "experiment" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(
        "# @package _global_\n"
        "defaults:\n"
        "  - override /kernel: combine\n"
        "  - override /workload: ${tilepipe.by_device:${hardware},deepseek_v3,tiny}\n"
        "name: mine\n"
        "hydra:\n"
        "  mode: MULTIRUN\n"
        "  sweeper:\n"
        "    params:\n"
        "      kernel.order: edf,random\n"
    )

    _, points, _ = command("--config-dir", str(mine.parent.parent), "+experiment=mine")

    assert [(p.name, p.operation, p.choices["workload"]) for p in points] == [
        ("mine", "combine", "tiny")
    ] * 2


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tilepipe +experiment=dispatch_gemm_order_", ["+experiment=dispatch_gemm_order_paced"]),
        ("tilepipe kernel=gr", ["kernel=grouped_gemm"]),
        ("tilepipe workload=deepseek_v3_s", ["workload=deepseek_v3_small"]),
    ],
)
def test_a_shell_completes_groups_and_experiments_quickly(line, found):
    environment = {**os.environ, "COMP_LINE": line}
    words = [sys.executable, "-m", "tilepipe.run", "-sc", "query=bash"]
    times = []
    for _ in range(3):
        # Of the processor: other work on this machine is not the completion's.
        begin = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime)

    assert done.stdout.split() == found
    assert min(times) < 0.5
