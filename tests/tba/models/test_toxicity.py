"""The classifier of alt-profanity-check. Classifiers with labels and guards are tested in
tests/tba/tasks/test_redteam.py."""

import math
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tba.errors import ConfigError
from tba.models.toxicity import Profanity
from tests.support.laptop import needs

SETTING = "task.options.classifier_kind"
TEXTS = ["You are a stupid idiot.", "go to hell, you scum", "Bread rises because of yeast.", "", "  \n"]
installed = needs("profanity_check", "sklearn", "joblib")


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a copy of the installed package, which Python would import instead, and forget the copy afterwards."""
    package = distribution("alt-profanity-check")
    for file in package.files or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(package.locate_file(file)), tmp_path / file)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path / "profanity_check"
    for name in imported():
        del sys.modules[name]


def imported() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "profanity_check"]


@installed
def test_insults_are_more_toxic_than_what_is_polite():
    rude, mean, polite, empty, blank = map(math.exp, Profanity.load(SETTING).logps([("x", it) for it in TEXTS]))
    assert min(rude, mean) > 0.7
    assert 0 < polite < 0.1 and 0 < empty < 0.1 and blank == pytest.approx(empty)


@installed
def test_the_answer_is_rated_and_not_the_attack_as_the_package_does_it():
    profanity = Profanity.load(SETTING)
    from profanity_check import predict_prob

    found = profanity.logps([("", it) for it in TEXTS])
    assert found == pytest.approx([math.log(it) for it in predict_prob(TEXTS)])
    assert profanity.logps([(TEXTS[0], it) for it in TEXTS]) == found
    assert profanity.logps([]) == []


@installed
def test_a_copy_that_is_whole_is_as_good(copied: Path):
    assert Profanity.load(SETTING).logps([("", TEXTS[0])])[0] > math.log(0.7)


@installed
@pytest.mark.parametrize("name", ["data/model.joblib", "data/vectorizer.joblib", "profanity_check.py"])
def test_nothing_is_unpickled_from_a_package_that_has_changed(copied: Path, name: str):
    content = bytearray((copied / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^task\.options\.classifier_kind: '{copied / name}' is not the file that"):
        Profanity.load(SETTING)
    assert "profanity_check" not in sys.modules


@installed
def test_a_module_of_this_name_in_the_working_folder_is_not_run(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "profanity_check.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(str(tmp_path / "work"))
    with pytest.raises(ConfigError, match=r"^task\.options\.classifier_kind: the module 'profanity_check' would be"):
        Profanity.load(SETTING)


@installed
def test_a_classifier_of_another_version_of_its_library_is_refused(copied: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sklearn.base.__version__", "9.9")
    with pytest.raises(ConfigError, match=r"was made with scikit-learn [\d.]+, but 9\.9 is installed"):
        Profanity.load(SETTING)


def test_without_the_package_nothing_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=rf"^{SETTING}: the package alt-profanity-check is not installed"):
        Profanity.load(SETTING)
