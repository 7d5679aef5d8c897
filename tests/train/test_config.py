"""The config of a run: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest

from shards.errors import UsageError
from train.config import SIZES, Config, docs, explain, flatten

MINIMAL = {"run": {"dir": "runs/a", "steps": 10}, "data": {"remote": "x"}}


def make(*sets: str) -> Config:
    return Config.from_tree(MINIMAL, sets, where="run.toml")[0]


def test_a_file_and_sets_on_top_of_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\ndir = "r"\nsteps = 5\n[data]\nremote = "x"\n[optim]\nlr = 1e-3\n')
    config, sources = Config.load(path, ["optim.lr=2e-3", "data.text=title", "model.tied=false"])
    assert (config.optim.lr, config.data.text, config.model.tied) == (2e-3, "title", False)
    assert sources["optim.lr"] == "--set optim.lr=2e-3"
    assert sources["run.steps"] == str(path)
    assert "optim.warmup" not in sources


def test_whole_numbers_serve_as_numbers() -> None:
    assert make("optim.clip=1").optim.clip == 1.0


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ("optim.learning_rat=1", "unknown key optim.learning_rat"),
        ("optm.lr=1", "did you mean optim"),
        ("lr=1", "did you mean optim.lr"),
        ("optim.warmupp=1", "did you mean optim.warmup"),
        ("zzz=1", "the config has run, data, model"),
        ("optim.lr=fast", "is not a number"),
        ("optim.lr=true", "is not a number"),
        ("run.steps=1.5", "is not a whole number"),
        ("run.steps=0", "is below 1"),
        ("run.deterministic=yes", "one of off, on, elastic"),
        ("model=3", "is a section"),
        ("model.image.size=30", "not a multiple"),
        ("model.kv_heads=4", "make model.kv_heads a divisor"),
        ("model.heads=5", "does not split"),
        ("model.size=3b", "one of 0.2m"),
        ("data.streams=3", "is a list"),
        ("data.remote=", "no data"),
        ("optim.lr", "expected KEY=VALUE"),
    ],
)
def test_a_wrong_value_is_refused_and_the_right_one_named(sets: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(sets)
    assert says in str(caught.value)
    assert caught.value.mend


def test_a_missing_key_says_what_it_means() -> None:
    with pytest.raises(UsageError, match=r"run\.dir is not set") as caught:
        Config.from_tree({"data": {"remote": "x"}}, where="run.toml")
    assert "Run folder" in caught.value.mend


def test_streams_are_checked_like_every_section() -> None:
    tree = {**MINIMAL, "data": {"streams": [{"remote": "a", "proportion": 1}, {"remot": "b"}]}}
    with pytest.raises(UsageError, match=r"unknown key data\.streams\[1\]\.remot"):
        Config.from_tree(tree, where="run.toml")


@pytest.mark.parametrize("size", SIZES)
def test_a_size_sets_what_the_file_does_not(size: str) -> None:
    config, sources = Config.from_tree({**MINIMAL, "model": {"size": size, "layers": 3}}, where="run.toml")
    assert config.model.dim == SIZES[size]["dim"]
    assert config.model.layers == 3
    assert sources["model.dim"] == f"model.size = {size}"


def test_a_size_set_by_hand_wins_over_the_file_and_not_over_other_sets() -> None:
    tree = {**MINIMAL, "model": {"dim": 128, "layers": 3, "context": 80}}
    config, sources = Config.from_tree(tree, ["model.layers=5", "model.size=2m"], where="run.toml")
    assert (config.model.dim, config.model.layers, config.model.context) == (SIZES["2m"]["dim"], 5, 80)
    assert sources["model.dim"] == "model.size = 2m"
    assert sources["model.layers"] == "--set model.layers=5"


def test_every_key_is_explained() -> None:
    meanings = dict(docs(Config))
    assert set(flatten(make())) <= set(meanings)
    assert [key for key, text in meanings.items() if not text] == []


def test_explain_names_where_each_value_came_from() -> None:
    config, sources = Config.from_tree(MINIMAL, ["optim.lr=1e-4"], where="run.toml")
    rows = {key: (value, source) for key, value, source, _ in explain(config, sources)}
    assert rows["optim.lr"] == (1e-4, "--set optim.lr=1e-4")
    assert rows["run.steps"] == (10, "run.toml")
    assert rows["optim.eps"] == (1e-8, "default")


def test_a_config_survives_the_run_folder() -> None:
    config = make("data.shuffle=false", "model.size=2m")
    assert Config.from_tree(config.to_dict(), where="config.json")[0] == config
