"""`load` finds out what it was given, and says so when it cannot."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from placewright.backends import load
from placewright.backends.tensorflow import models
from placewright.errors import ModelError
from placewright.graph import Edge, Graph, Op, Tensor


@pytest.fixture
def chain() -> Graph:
    return Graph.from_ops(
        "chain",
        [Op(name="a", type="Const", outputs=(Tensor(4),)), Op(name="b", type="Relu")],
        [Edge("a", "b")],
    )


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_front_ends_import_without_tensorflow() -> None:
    assert run_python("import placewright.backends, sys; print('tensorflow' in sys.modules)") == (
        "False"
    )


def test_tensorflow_that_is_not_installed_is_named_with_its_install_command() -> None:
    said = run_python(
        """
        import sys
        sys.modules["tensorflow"] = None  # what an absent package looks like to import
        from placewright.errors import MissingExtraError
        from placewright.backends import load
        try:
            load("rnnlm", backend="tensorflow", scale="small")
        except MissingExtraError as error:
            print(error)
        """
    )
    assert said == (
        "reading TensorFlow models needs the optional dependency 'tensorflow', which is not "
        "installed; run: pip install 'placewright[tensorflow]'"
    )


def test_tensorflow_starts_without_noise() -> None:
    pytest.importorskip("tensorflow")
    done = subprocess.run(
        [sys.executable, "-c", "import placewright.backends.tensorflow"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_graph_is_returned_as_it_is(chain: Graph) -> None:
    assert load(chain) is chain


def test_json_file(chain: Graph, tmp_path: Path) -> None:
    for name in ("chain.json", "chain.json.gz"):
        chain.save(tmp_path / name)
        assert load(tmp_path / name) == chain
    assert load(str(tmp_path / "chain.json")) == chain


def test_benchmark_model_has_its_training_step_and_its_groups() -> None:
    pytest.importorskip("tensorflow")
    graph = load("rnnlm", scale="small", batch=4)
    model = models.build("rnnlm", scale="small", batch=4)
    assert graph.name == "rnnlm"
    assert tuple(map(tuple, graph.group_rules)) == model.group_rules
    assert model.train_op in graph.op_index
    assert model.init_op not in graph.op_index
    tokens = next(op for op in graph.ops() if op.name == "tokens")
    shape = tokens.outputs[0].shape
    assert shape is not None
    assert shape[1] == 4
    # Adam has two moments for each parameter, and the powers of its two betas.
    assert graph.slot_bytes.sum() == 2 * graph.param_bytes.sum() + 8


def test_file_goes_before_a_benchmark_model_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nmt").write_text("mine")
    with pytest.raises(
        ModelError, match=r"^nmt: not a kind of file that is known; known are \.json"
    ):
        load("nmt")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "ntm",
            "there is no benchmark model or file 'ntm' (did you mean 'nmt'?); benchmark models are "
            "rnnlm, nmt, inception_v3; files are .json or .json.gz (graph file), .pb or .pbtxt "
            "(TensorFlow GraphDef), .meta (MetaGraph) or a SavedModel's directory, "
            "FILE.py:FUNCTION or package.module:FUNCTION (PyTorch), .pt2 (torch.export)",
        ),
        ("gone.pb", "gone.pb: no such file or directory"),
        ("gone/model", "gone/model: no such file or directory"),
    ],
)
def test_source_that_is_not_there(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as error:
        load(source)
    assert str(error.value) == said


def test_file_of_unknown_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"model\.onnx: not a kind of file that is known"):
        load(path)


def test_object_of_unknown_kind() -> None:
    with pytest.raises(ModelError, match="cannot read a graph from a int"):
        load(3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 3}, "batch means nothing for a graph file"),
        ({"batch": 0}, "batch means nothing for a graph file"),
        ({"dims": {"x": 1}}, "dims means nothing for a graph file"),
        ({"fetches": ["b"]}, "fetches means nothing for a graph file"),
        ({"signature": "train"}, "signature means nothing for a graph file"),
    ],
)
def test_option_without_effect_is_refused(
    chain: Graph, tmp_path: Path, options: dict[str, object], said: str
) -> None:
    chain.save(tmp_path / "chain.json")
    with pytest.raises(ModelError, match=said):
        load(tmp_path / "chain.json", **options)  # type: ignore[arg-type]


def test_unknown_scale() -> None:
    pytest.importorskip("tensorflow")
    with pytest.raises(ModelError, match="unknown scale 'huge'; choose from paper, small"):
        load("nmt", scale="huge")
