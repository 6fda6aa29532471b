"""The control-plane binaries are found, or built once, or it is said plainly what is missing."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ballast_localcluster import binaries
from ballast_localcluster.binaries import PROGRAMS, build_key, find_binaries
from ballast_localcluster.errors import BinariesError
from ballast_localcluster.karpenter.start import (
    INSTANCE_TYPES,
    find_karpenter,
    karpenter_version,
    present_karpenter,
    read_instance_types,
)
from ballast_operator.cli.local.up import up
from click.testing import CliRunner

from tests.support.waiting import WAIT_SECONDS, eventually, is_alive

FAKE_GO = """#!/bin/sh
case "$1" in
  env) echo "${FAKE_GO_VERSION:-go1.99.1}" ;;
  list) echo example.com/a ;;
  build)
    while [ "$1" != -o ]; do shift; done
    [ -n "$FAKE_GO_HANGS" ] && { echo $$ > "$FAKE_GO_HANGS"; exec sleep 3600; }
    echo build >> "$FAKE_GO_BUILDS"; env > "$FAKE_GO_BUILDS.env"
    [ -n "$FAKE_GO_FAILS" ] && { echo "main.go:1:2: made to fail" >&2; exit 1; }
    sleep "${FAKE_GO_SECONDS:-0}"; echo "#!/bin/sh" > "$2"; chmod +x "$2" ;;
esac
"""


SETUP = [sys.executable, "-S", "-m", "ballast_localcluster.setup"]
"""As `make setup` runs it: by a Python without any package, beside the one that downloads them."""


@pytest.fixture
def fake_go(tmp_path, monkeypatch):
    """A compiler that builds nothing, counts its builds, and a cache folder of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    go = folder / "go"
    go.write_text(FAKE_GO)
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_GO_BUILDS", str(tmp_path / "builds"))
    monkeypatch.setenv("PYTHONPATH", str(Path(binaries.__file__).parents[1]))
    for variable in ("BALLAST_CONTROLPLANE", "KUBEBUILDER_ASSETS", "BALLAST_KARPENTER"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "builds"


def programs_in(folder, names):
    folder.mkdir()
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


def test_what_is_built_is_kept(fake_go, tmp_path):
    """The second look finds the first's build, under the user's cache folder, and no half-made folder."""
    said = []
    first = find_binaries(said.append)
    assert find_binaries(said.append) == first
    assert fake_go.read_text() == "build\n"
    assert first.folder.is_relative_to(tmp_path / "cache" / "ballast" / "controlplane")
    assert all(os.access(first.program(name), os.X_OK) for name in PROGRAMS)
    assert [entry for entry in first.folder.parent.iterdir() if "building" in entry.name] == []
    assert any("control plane built" in line for line in said)


@pytest.mark.parametrize("code_of", ["caller", "another user"])
def test_sudo_takes_the_build_of_the_caller_whose_code_it_runs(fake_go, tmp_path, monkeypatch, code_of):
    """`sudo ballast up` builds nothing that `make setup` built; root runs no other user's programs."""
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    built = find_binaries(lambda line: None)
    owner = Path(binaries.__file__).stat().st_uid
    monkeypatch.setenv("SUDO_UID", str(owner if code_of == "caller" else owner + 1))
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_dir=str(home)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "roots"))
    assert (find_binaries(lambda line: None) == built) == (code_of == "caller")


def test_a_build_is_of_the_pinned_modules_for_this_machine_whatever_go_is_told_elsewhere(
    fake_go, monkeypatch
):
    """As by a shell that builds for another system, or in a project with a vendor folder."""
    for name, value in {"GOOS": "plan9", "GOARCH": "mips", "GO111MODULE": "off"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GOFLAGS", "-p=2 -mod=vendor")
    find_binaries(lambda line: None)
    seen = Path(f"{fake_go}.env").read_text().splitlines()
    assert {"GO111MODULE=on", "GOFLAGS=-p=2 -mod=vendor -mod=readonly"} <= set(seen)
    assert not [line for line in seen if line.startswith(("GOOS=", "GOARCH="))]


@pytest.mark.slow
def test_two_builders_at_once_build_once(fake_go, monkeypatch):
    """The second waits for the first and takes its build."""
    monkeypatch.setenv("FAKE_GO_SECONDS", "0.3")
    builders = [subprocess.Popen(SETUP, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [builder.wait(WAIT_SECONDS) for builder in builders] == [0, 0]
    assert fake_go.read_text() == "build\n"


@pytest.mark.processes
def test_a_builder_that_is_told_to_end_takes_the_compiler_with_it(fake_go, tmp_path, monkeypatch):
    """Nothing compiles on behind an interrupted `make setup`, and no half-made folder is left."""
    hangs = tmp_path / "hangs"
    monkeypatch.setenv("FAKE_GO_HANGS", str(hangs))
    with subprocess.Popen(SETUP, stderr=subprocess.DEVNULL) as builder:
        eventually(lambda: hangs.exists() and hangs.read_text().strip(), "the compiler to start")
        builder.terminate()
        assert builder.wait(WAIT_SECONDS) == 128 + signal.SIGTERM
    eventually(lambda: not is_alive(int(hangs.read_text())), "the compiler to be gone")
    assert {entry.suffix for entry in (tmp_path / "cache/ballast/controlplane").iterdir()} == {".lock"}


def test_a_failed_build_shows_the_compilers_words_and_leaves_nothing(fake_go, tmp_path, monkeypatch):
    """So that the next try starts from the beginning."""
    monkeypatch.setenv("FAKE_GO_FAILS", "1")
    with pytest.raises(BinariesError, match="made to fail"):
        find_binaries(lambda line: None)
    kept = {entry.suffix for entry in (tmp_path / "cache/ballast/controlplane").iterdir()}
    assert kept == {".lock"}


@pytest.mark.parametrize("cache", ["/proc/1/none", "a file", ""], ids=["unwritable", "file", "no home"])
def test_a_folder_that_cannot_be_written_is_named(fake_go, tmp_path, monkeypatch, cache):
    """As a home folder of another user, or none at all; by `make setup`, in one line."""
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", cache and str(tmp_path / cache))
    monkeypatch.delenv("HOME", raising=False)
    without = "import os, runpy; os.getuid = lambda: 2**31; "
    code = without + "runpy.run_module('ballast_localcluster.setup', run_name='__main__')"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "set XDG_CACHE_HOME" in done.stderr or "set HOME or XDG_CACHE_HOME" in done.stderr


def test_without_go_it_is_said_what_to_install(fake_go, monkeypatch, tmp_path):
    """One message, with the version and the way around."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        BinariesError, match=r"no `go` found.*To fix: install Go 1\.\d+ or later.*BALLAST_CONTROLPLANE"
    ):
        find_binaries(lambda line: None)


def test_an_old_go_is_refused_by_its_version(fake_go, monkeypatch):
    monkeypatch.setenv("FAKE_GO_VERSION", "go1.19.4")
    with pytest.raises(BinariesError, match=r"is go1\.19\.4, and the local control plane needs Go 1\."):
        find_binaries(lambda line: None)


def test_a_folder_with_all_programs_takes_the_place_of_the_build(fake_go, tmp_path, monkeypatch):
    """Named by BALLAST_CONTROLPLANE, or by KUBEBUILDER_ASSETS."""
    folder = programs_in(tmp_path / "given", PROGRAMS)
    for variable in ("BALLAST_CONTROLPLANE", "KUBEBUILDER_ASSETS"):
        with monkeypatch.context() as environment:
            environment.setenv(variable, str(folder))
            assert find_binaries().folder == folder
    assert not fake_go.exists()


def test_an_incomplete_folder_is_refused_if_it_was_meant_for_us(fake_go, tmp_path, monkeypatch):
    """BALLAST_CONTROLPLANE must hold all; a KUBEBUILDER_ASSETS with three programs is passed over."""
    folder = programs_in(tmp_path / "given", ("etcd", "kube-apiserver", "kubectl"))
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(folder))
    assert find_binaries(lambda line: None).folder != folder
    monkeypatch.setenv("BALLAST_CONTROLPLANE", str(folder))
    with pytest.raises(BinariesError, match="has no kube-controller-manager, kube-scheduler"):
        find_binaries()


def test_the_key_follows_every_byte_of_the_source(tmp_path):
    """Another module version or another main.go is another build."""
    for name in ("go.mod", "go.sum", "main.go"):
        (tmp_path / name).write_bytes((binaries.SOURCE / name).read_bytes())
    before = build_key(tmp_path)
    assert before == build_key()
    for name in ("go.sum", "main.go"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"\n")
        after = build_key(tmp_path)
        assert after != before
        before = after


@pytest.mark.parametrize("minor", ["1.34", "1.35", "1.36", "1.37"])
def test_each_supported_minor_has_pinned_sources(minor, monkeypatch):
    """Another folder for each, and the API server says its version."""
    default = build_key()
    monkeypatch.setenv("BALLAST_KUBERNETES", minor)
    assert build_key().startswith(f"v{minor}.")
    assert (build_key() == default) == (minor == "1.34")
    module = binaries.module_file()
    assert module.with_suffix(".sum").stat().st_size > 10_000
    pinned = {line.split()[3] for line in module.read_text().splitlines() if "=> k8s.io/" in line}
    assert pinned == {binaries.kubernetes_version().replace("v1.", "v0.", 1)}


def test_a_minor_that_is_not_pinned_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("BALLAST_KUBERNETES", "1.12")
    with pytest.raises(BinariesError, match=r"no such minor\. To fix: one of 1\.34, 1\.35, 1\.36, 1\.37"):
        find_binaries()


def test_another_minor_is_built_from_its_own_module_file(fake_go, monkeypatch):
    """Beside the default's build, not in its place."""
    first = find_binaries(lambda line: None)
    monkeypatch.setenv("BALLAST_KUBERNETES", "1.35")
    second = find_binaries(lambda line: None)
    assert first != second and second.folder.name.startswith("v1.35.")
    assert fake_go.read_text() == "build\n" * 2


def test_karpenter_is_built_once_when_it_is_asked_for(fake_go, tmp_path):
    """Beside the control plane; a look builds nothing."""
    assert present_karpenter() is None
    assert not fake_go.exists()
    first = find_karpenter(lambda line: None)
    assert find_karpenter(lambda line: None) == present_karpenter() == first
    assert fake_go.read_text() == "build\n"
    assert first.folder.is_relative_to(tmp_path / "cache" / "ballast" / "karpenter")
    assert first.folder.name.startswith(karpenter_version() + "-")
    assert os.access(first.program, os.X_OK)


def test_a_go_that_is_too_old_for_karpenter_by_a_patch_is_refused(fake_go, monkeypatch):
    """Its module names one, and Go's own refusal is no help."""
    monkeypatch.setenv("FAKE_GO_VERSION", "go1.26.5")
    with pytest.raises(
        BinariesError, match=r"go1\.26\.5, and Karpenter needs Go 1\.26\.6\. To fix: .*BALLAST_KARPENTER"
    ):
        find_karpenter(lambda line: None)


def test_a_folder_with_karpenter_and_its_definitions_takes_the_place_of_the_build(tmp_path, monkeypatch):
    """Named by BALLAST_KARPENTER; one that lacks something is refused."""
    folder = programs_in(tmp_path / "given", ["karpenter-kwok"])
    monkeypatch.setenv("BALLAST_KARPENTER", str(folder))
    with pytest.raises(
        BinariesError, match=r"BALLAST_KARPENTER=.* has no program karpenter-kwok, or no crds"
    ):
        present_karpenter()
    (folder / "crds").mkdir()
    (folder / "crds" / "nodepools.yaml").write_text("kind: CustomResourceDefinition\n")
    found = find_karpenter()
    assert (found.folder, [path.name for path in found.crds]) == (folder, ["nodepools.yaml"])


def test_the_usual_instance_types_can_be_read():
    assert read_instance_types(INSTANCE_TYPES) == ("v100-1", "v100-2", "p100-1", "p100-2", "k80-1", "k80-2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "expected a list of instance types"),
        ("7", "an instance type needs name, "),
        ('[{"name": "a"}]', "an instance type needs name, "),
        (
            '[{"name": 1, "architecture": "a", "operatingSystems": [], "resources": {}, "offerings": []}]',
            "needs",
        ),
        (
            '{"name": "a", "architecture": "a", "operatingSystems": [], "resources": {}, "offerings": []}',
            "a list",
        ),
    ],
)
def test_instance_types_that_karpenter_cannot_read_are_refused_before_anything_starts(tmp_path, text, said):
    """By `ballast up --karpenter FILE`, in a line that names the file."""
    path = tmp_path / "types.json"
    path.write_text(text)
    done = CliRunner().invoke(up, ["--nodes", "none", "--name", "never", "--karpenter", str(path)])
    assert done.exit_code == 1
    assert str(path) in done.output and said in done.output.replace("\n", " ")
    assert "No such file" in CliRunner().invoke(up, ["--karpenter", str(tmp_path / "none")]).output
