"""Check that the working tree can be released: `make release-check`.

All checks run, and each prints one line of the checklist. The exit code is 1 if one of them failed.
Artifacts lie in dist/ afterwards: wheels, sdist and SBOM. Nothing is uploaded and no tag is set.

    python scripts/release_check.py            runs all checks
    python scripts/release_check.py --update   also writes docs/licenses.md anew
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import licenses

ROOT = Path(__file__).resolve().parents[1]
UNRELEASED = "Unreleased"
# Files with a version of duoka: the path, and the pattern of the version.
VERSIONS = {
    "src/duoka/__init__.py": r'^__version__ = "([^"]+)"$',
    "CITATION.cff": r"^version: (\S+)$",
    "CHANGELOG.md": rf"^## \[(?!{UNRELEASED})([^\]]+)\]",
    "tests/golden/kept/requests/served.txt": r'^\{"version":"([^"]+)"\}$',
}
# Mentions on pages and in deployment files: duoka==0.2.0, duoka:0.2.0, duoka-0.2.0.
MENTION = re.compile(r"duoka(?:\[[\w,]+\])?(?:==|:|-)(\d+\.\d+\.\d+)")
SOURCES_ONLY = (".c", ".h")
COMPILED = "duoka/forecast/_memory.abi3.so"
# Runs in the fresh environment: generated files against the installed program.
PAGES = """
import reference, schemas, json
def compare(file, text, command):
    assert file.read_text(encoding="utf-8") == text, f"{file} is old; run: {command}"
compare(reference.PAGE, reference.page(), "make reference")
for file, schema in ((schemas.PLAN_FILE, schemas.plan_schema()),
                     (schemas.REPORT_FILE, schemas.report_schema())):
    compare(file, json.dumps(schema, indent=1) + "\\n", "make schema")
"""


class CheckError(Exception):
    """A check found faults; the arguments describe them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Paths of one run."""

    root: Path
    version: str

    @property
    def dist(self) -> Path:
        """The directory of the artifacts."""
        return self.root / "dist"

    @property
    def environment(self) -> Path:
        """The environment into which the wheel is installed."""
        return self.root / "build" / "release" / "venv"

    @property
    def site_packages(self) -> Path:
        """The installed packages of this environment."""
        return next(self.environment.glob("lib/python*/site-packages"))

    def wheel(self, tag: str) -> Path:
        """Return the wheel whose tag contains a text."""
        found = list(self.dist.glob(f"duoka-{self.version}-*{tag}*.whl"))
        if len(found) != 1:
            raise CheckError(f"dist/ has {len(found)} wheels with {tag} in their tags")
        return found[0]


def recorded_versions(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the version that each file of `VERSIONS` records, or "none"."""
    found = {path: re.search(VERSIONS[path], texts[path], re.MULTILINE) for path in VERSIONS}
    return {path: match[1] if match else "none" for path, match in found.items()}


def version_faults(
    version: str, recorded: Mapping[str, str], pages: Mapping[str, str]
) -> list[str]:
    """Describe each file that records or mentions another version."""
    faults = [
        f"{path} has version {other}, not {version}"
        for path, other in recorded.items()
        if other != version
    ]
    for path, text in pages.items():
        others = sorted(set(MENTION.findall(text)) - {version})
        faults += [f"{path} mentions version {other}, not {version}" for other in others]
    return faults


def changelog_faults(version: str, changelog: str, citation: str) -> list[str]:
    """Describe what the changelog lacks for the release of a version."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    titles = [section.partition("\n")[0].strip() for section in sections]
    faults = []
    for title, section in zip(titles, sections, strict=True):
        if title == f"[{UNRELEASED}]" and section.partition("\n")[2].strip():
            faults.append(f"[{UNRELEASED}] is not empty: move its entries to [{version}]")
    date = next(
        (title[len(version) + 5 :] for title in titles if title.startswith(f"[{version}]")), ""
    )
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        faults.append(f"a section '## [{version}] - YYYY-MM-DD' is missing")
    elif f'date-released: "{date}"' not in citation:
        faults.append(f"CITATION.cff has another date than the changelog's {date}")
    return faults


def wheel_faults(names: Iterable[str], sources: Iterable[str], *, is_compiled: bool) -> list[str]:
    """Compare the files of a wheel with the source files of the package (paths from duoka/ on)."""
    # auditwheel adds entries of directories.
    files = {
        name
        for name in names
        if not name.endswith("/") and not name.split("/")[0].endswith(".dist-info")
    }
    expected = {name for name in sources if not name.endswith(SOURCES_ONLY)}
    expected |= {COMPILED} if is_compiled else set()
    return [
        *(f"it lacks {name}" for name in sorted(expected - files)),
        *(f"it contains {name}" for name in sorted(files - expected)),
    ]


def sdist_faults(names: Iterable[str], tracked: Iterable[str]) -> list[str]:
    """Compare the files of an sdist with the tracked files (paths from the root on)."""
    files, tracked = set(names), set(tracked)
    needed = {name for name in tracked if name.startswith("src/")}
    needed |= {"pyproject.toml", "hatch_build.py", "constraints.txt", "LICENSE", "README.md"}
    return [
        *(f"it lacks {name}" for name in sorted(needed - files)),
        *(f"it contains {name}" for name in sorted(files - tracked - {"PKG-INFO"})),
    ]


def run_command(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command; return its output, or raise CheckError with the end of it."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        words = " ".join(str(word) for word in command)
        raise CheckError(f"{words}\n{done.stdout[-3000:]}", f"exit code {done.returncode}")
    return done.stdout


def run_tool(module: str, *arguments: str | Path, **environment: str) -> str:
    """Run a tool of this environment, whose other programs it finds too."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run_command(sys.executable, "-m", module, *arguments, **{"PATH": path, **environment})


def tracked_files(root: Path) -> list[str]:
    """Return the files that git tracks."""
    return run_command("git", "ls-files", cwd=root).splitlines()


def refuse(faults: list[str]) -> None:
    """Raise CheckError for faults."""
    if faults:
        raise CheckError(*faults)


def check_versions(release: Release) -> str:
    """All files record and mention the same version."""
    texts = {path: (release.root / path).read_text(encoding="utf-8") for path in VERSIONS}
    paths = [
        path
        for path in tracked_files(release.root)
        if path.startswith(("README", "docs/", "docker/", ".github/")) and not path.endswith(".svg")
    ]
    pages = {path: (release.root / path).read_text("utf-8", errors="replace") for path in paths}
    refuse(version_faults(release.version, recorded_versions(texts), pages))
    return f"{release.version} in {len(texts)} files, and no other on {len(pages)} pages"


def check_changelog(release: Release) -> str:
    """The changelog has a dated section."""
    texts = [(release.root / name).read_text("utf-8") for name in ("CHANGELOG.md", "CITATION.cff")]
    refuse(changelog_faults(release.version, *texts))
    return f"CHANGELOG.md has [{release.version}] with a date, CITATION.cff the same date"


def check_git(release: Release) -> str:
    """Everything is committed, and the tag is free."""
    changed = run_command("git", "status", "--porcelain", cwd=release.root).splitlines()
    tag = f"v{release.version}"
    has_tag = run_command("git", "tag", "--list", tag, cwd=release.root).strip()
    refuse([f"not committed: {line}" for line in changed] + [f"tag {tag} exists"] * bool(has_tag))
    commit = run_command("git", "rev-parse", "--short", "HEAD", cwd=release.root).strip()
    return f"commit {commit} is clean, tag {tag} is free"


def check_build(release: Release) -> str:
    """Build the sdist, and of it both wheels; give the compiled one its manylinux tag."""
    shutil.rmtree(release.dist, ignore_errors=True)
    raw = release.root / "build" / "release" / "wheels"
    shutil.rmtree(raw, ignore_errors=True)
    run_tool("build", "--sdist", "--outdir", release.dist)
    sdist = release.dist / f"duoka-{release.version}.tar.gz"
    with tarfile.open(sdist) as archive:
        archive.extractall(raw, filter="data")
    source = raw / f"duoka-{release.version}"
    run_tool("build", "--wheel", "--outdir", release.dist, source, DUOKA_COMPILE="0")
    run_tool("build", "--wheel", "--outdir", raw, source, DUOKA_COMPILE="1")
    (compiled,) = raw.glob("*.whl")
    run_tool("auditwheel", "repair", "--wheel-dir", release.dist, compiled)
    files = sorted(release.dist.iterdir())
    return ", ".join(f"{file.name} ({file.stat().st_size / 1e6:.2f} MB)" for file in files)


def check_metadata(release: Release) -> str:
    """The index can show the description, and the compiled module keeps to the stable ABI."""
    files = sorted(release.dist.glob(f"duoka-{release.version}*"))
    run_tool("twine", "check", "--strict", *files)
    run_tool("abi3audit", "--strict", release.wheel("abi3"))
    return f"twine check --strict: {len(files)} files; abi3audit: CPython 3.11 or newer"


def check_contents(release: Release) -> str:
    """The artifacts contain the source files, and nothing else."""
    tracked = tracked_files(release.root)
    sources = [name.removeprefix("src/") for name in tracked if name.startswith("src/")]
    faults, counts = [], []
    for tag, is_compiled in (("abi3", True), ("none-any", False)):
        wheel = release.wheel(tag)
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        counts.append(len(names))
        found = wheel_faults(names, sources, is_compiled=is_compiled)
        faults += [f"{wheel.name}: {fault}" for fault in found]
    with tarfile.open(release.dist / f"duoka-{release.version}.tar.gz") as archive:
        names = [member.name.partition("/")[2] for member in archive if member.isfile()]
    faults += [f"sdist: {fault}" for fault in sdist_faults(names, tracked)]
    refuse(faults)
    return f"wheels of {counts[0]} and {counts[1]} files, sdist of {len(names)}"


def check_install(release: Release) -> str:
    """Install the compiled wheel with all extras; run the demo without a compiler on PATH."""
    shutil.rmtree(release.environment, ignore_errors=True)
    venv.create(release.environment, symlinks=True)  # without pip, which the SBOM would list
    python = release.environment / "bin" / "python"
    constraints = ("-c", release.root / "constraints.txt")
    wheel = f"{release.wheel('abi3')}[all]"
    run_tool("pip", "--python", python, "install", "--quiet", *constraints, wheel)
    path = str(release.environment / "bin")
    home = release.root / "build" / "release"
    program = release.environment / "bin" / "duoka"
    shown = run_command(program, "--version", cwd=home, PATH=path).strip()
    if shown != f"duoka {release.version}":
        raise CheckError(f"duoka --version prints {shown!r}")
    run_command(python, "-c", "import duoka.forecast._memory", cwd=home, PATH=path)
    start = time.monotonic()
    run_command(program, "demo", cwd=home, PATH=path, OMP_NUM_THREADS="2")
    return f"duoka[all] installed, {shown}, demo in {time.monotonic() - start:.0f} s"


def check_pages(release: Release) -> str:
    """The generated reference and schemas are those of the installed wheel."""
    python = release.environment / "bin" / "python"
    tests = str(release.root / "tests")
    run_command(python, "-c", PAGES, cwd=release.environment, PYTHONPATH=tests)
    return "docs/cli.md and the JSON schemas are those of the installed program"


def check_licenses(release: Release) -> str:
    """All licenses are allowed, and docs/licenses.md is up to date."""
    packages = licenses.installed_packages(release.site_packages)
    shown = licenses.parse_page(licenses.PAGE.read_text(encoding="utf-8"))
    refuse(licenses.license_faults(packages) + licenses.page_faults(shown, packages))
    return f"{len(packages)} packages, as in docs/licenses.md; all are allowed"


def check_sbom(release: Release) -> str:
    """Write the SBOM of the fresh environment."""
    file = release.dist / f"duoka-{release.version}.cdx.json"
    python = release.environment / "bin" / "python"
    options = ("--pyproject", release.root / "pyproject.toml", "--output-reproducible")
    run_tool("cyclonedx_py", "environment", *options, "--output-file", file, python)
    content = json.loads(file.read_text(encoding="utf-8"))
    content["metadata"]["component"]["version"] = release.version  # pyproject.toml has none
    text = json.dumps(content, indent=2) + "\n"
    if "file://" in text:
        raise CheckError("the SBOM names files of this machine")
    file.write_text(text, encoding="utf-8")
    number = len(content["components"])
    return f"{file.name}: CycloneDX {content['specVersion']}, {number} components"


CHECKS: dict[str, Callable[[Release], str]] = {
    "versions": check_versions,
    "changelog": check_changelog,
    "git": check_git,
    "build": check_build,
    "metadata": check_metadata,
    "contents": check_contents,
    "install": check_install,
    "pages": check_pages,
    "licenses": check_licenses,
    "SBOM": check_sbom,
}
# Checks that need the artifacts or the environment of an earlier one.
NEEDS = {
    "metadata": "build",
    "contents": "build",
    "install": "build",
    "pages": "install",
    "licenses": "install",
    "SBOM": "install",
}


def run_checks(
    release: Release,
    checks: Mapping[str, Callable[[Release], str]],
    needs: Mapping[str, str] = NEEDS,
) -> list[str]:
    """Run the checks, print the checklist, and return the names of those that failed."""
    failed: list[str] = []
    for name, check in checks.items():
        if needs.get(name) in failed:
            failed.append(name)
            print(f"- {name}: not checked, because {needs[name]} failed", flush=True)
            continue
        try:
            print(f"✓ {name}: {check(release)}", flush=True)
        except CheckError as error:
            failed.append(name)
            print(f"✗ {name}:", *error.args, sep="\n    ", flush=True)
    return failed


def update_licenses(release: Release) -> str:
    """Write docs/licenses.md of the fresh environment."""
    licenses.write_page(licenses.installed_packages(release.site_packages))
    return check_licenses(release)


def main() -> int:
    """Run all checks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="write docs/licenses.md")
    arguments = parser.parse_args()
    source = (ROOT / "src/duoka/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(VERSIONS["src/duoka/__init__.py"], source, re.MULTILINE)
    checks = CHECKS | ({"licenses": update_licenses} if arguments.update else {})
    failed = run_checks(Release(root=ROOT, version=version), checks)
    print(f"not ready: {', '.join(failed)}" if failed else f"duoka {version} can be released")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
