"""TensorFlow, imported without its noise.

What we use of TensorFlow that is not public API stands here and nowhere else, so that a new version
is checked in one place.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from placewright.errors import MissingExtraError, ModelError

GraphDef = Any
NodeDef = Any
"""TensorFlow is untyped; these aliases say what is meant."""


@contextlib.contextmanager
def _silenced_stderr() -> Iterator[None]:
    # TensorFlow's C++ side writes there whatever the log level; only the file descriptor stops it.
    try:
        saved = os.dup(2)
    except OSError:  # no stderr, no noise
        yield
        return
    try:
        sys.stderr.flush()
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Holds off Python's cyclic garbage collector, which would more than double the time.

    Conversion makes many objects and no garbage, while TensorFlow keeps half a million objects that
    each full collection walks through.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def shorten(error: BaseException) -> str:
    """What an error of TensorFlow says, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
try:
    with _silenced_stderr() if "tensorflow" not in sys.modules else contextlib.nullcontext():
        import tensorflow as tf
        from google.protobuf import text_format  # type: ignore[import-untyped]
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
        from tensorflow.core.protobuf import rewriter_config_pb2, saved_model_pb2
        from tensorflow.python.framework import kernels as _kernels
        from tensorflow.python.framework import op_def_registry as _op_def_registry
        from tensorflow.python.grappler import tf_optimizer as _tf_optimizer
        from tensorflow.python.ops import handle_data_util as _handle_data_util
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise MissingExtraError("reading TensorFlow models", "tensorflow") from None
except ImportError as error:
    raise ModelError(f"TensorFlow is installed but does not start: {shorten(error)}") from error

SavedModel = saved_model_pb2.SavedModel

__all__ = [
    "DecodeError",
    "GraphDef",
    "NodeDef",
    "SavedModel",
    "dtype_name",
    "has_cpu_kernel",
    "import_graph_def",
    "inline_functions",
    "op_def",
    "paused_collector",
    "resource_shape_and_type",
    "shorten",
    "text_format",
    "tf",
    "traces",
]


@functools.cache
def op_def(op_type: str) -> Any:
    """TensorFlow's definition of an op type, or None when it has none."""
    return _op_def_registry.get(op_type)


@functools.cache
def has_cpu_kernel(op_type: str) -> bool:
    registered = _kernels.get_registered_kernels_for_op(op_type).kernel
    return any(kernel.device_type in ("CPU", "DEFAULT") for kernel in registered)


@functools.cache
def dtype_name(enum: int) -> str:
    """`float32` for DT_FLOAT and for DT_FLOAT_REF."""
    try:
        name: str = tf.dtypes.as_dtype(enum).base_dtype.name
    except TypeError:
        raise ModelError(
            f"dtype number {enum} is unknown to TensorFlow {tf.__version__}; is the model newer?"
        ) from None
    return name


def resource_shape_and_type(tensor: Any) -> Any | None:
    """Shape and dtype of the variable behind a handle, None for handles of other things."""
    data = _handle_data_util.get_resource_handle_data(tensor)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    return data.shape_and_type[0]


def traces(function: Any) -> Sequence[Any]:
    """The concrete functions of a `tf.function`, one for each distinct signature."""
    # A function that makes its variables in its first call is traced twice for one signature; the
    # later trace is the one that later calls use.
    distinct = {str(concrete.function_type): concrete for concrete in _all_traces(function)}
    return tuple(distinct.values())


def _all_traces(function: Any) -> Sequence[Any]:
    return tuple(function._list_all_concrete_functions())


def inline_functions(graph_def: GraphDef, fetches: Sequence[str]) -> GraphDef:
    """The graph with function calls replaced by their bodies and loops by Switch, Merge and so on.

    Nodes in `fetches` keep their names. Raises what TensorFlow raises.
    """
    meta_graph = tf.compat.v1.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(graph_def)
    for function in meta_graph.graph_def.library.function:
        # Both would keep the body closed: a hint to leave the call alone, and a mark of functions
        # that have another implementation for other devices.
        for hint in ("_noinline", "api_implements"):
            function.attr.pop(hint, None)
        _ask_for_lowering(function.node_def)
    _ask_for_lowering(meta_graph.graph_def.node)
    disguised = _disguise_inputs(meta_graph.graph_def.node)
    # Grappler reads from this collection which nodes must survive.
    meta_graph.collection_def["train_op"].node_list.value.extend(fetches)
    config = tf.compat.v1.ConfigProto()
    options = config.graph_options.rewrite_options
    options.min_graph_nodes = -1  # small graphs too
    options.optimizers.append("function")
    options.function_optimization = rewriter_config_pb2.RewriterConfig.AGGRESSIVE
    options.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    with _silenced_stderr():
        inlined = _tf_optimizer.OptimizeGraph(config, meta_graph)
    for node in inlined.node:
        if node.name in disguised:
            node.op = "Placeholder"
            del node.attr["memory_region_name"]
    return inlined


_CONTROL_FLOW = frozenset(["If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase"])


def _ask_for_lowering(nodes: Sequence[NodeDef]) -> None:
    for node in nodes:
        if node.op in _CONTROL_FLOW:
            node.attr["_lower_using_switch_merge"].b = True


def _disguise_inputs(nodes: Sequence[NodeDef]) -> set[str]:
    """Makes inputs look like another kind of source; gives their names.

    For each input it sees, Grappler allocates a tensor to feed, however large.
    """
    names = set()
    for node in nodes:
        if node.op == "Placeholder":
            node.op = "ImmutableConst"
            node.attr["memory_region_name"].s = b"input"
            names.add(node.name)
    return names


def import_graph_def(graph_def: GraphDef) -> Sequence[Any]:
    """TensorFlow's operations for a graph, with shapes inferred; raises what TensorFlow raises."""
    with _silenced_stderr():  # errors are raised as well as written
        try:
            return _import_fast(graph_def)
        except (AttributeError, ImportError, TypeError):  # another version's internals
            graph = tf.Graph()
            with graph.as_default():
                tf.graph_util.import_graph_def(graph_def, name="")
            return tuple(graph.get_operations())


def _import_fast(graph_def: GraphDef) -> Sequence[Any]:
    # The public import spends 80% of its time on Python state that nobody asks for here: 4 s for a
    # graph of 30,000 ops.
    from tensorflow.python.client import pywrap_tf_session
    from tensorflow.python.framework import c_api_util, ops

    graph = tf.Graph()
    options = c_api_util.ScopedTFImportGraphDefOptions()
    serialized = pywrap_tf_session.TF_NewBufferFromString(graph_def.SerializeToString())
    try:
        with graph._c_graph.get() as c_graph:
            results = pywrap_tf_session.TF_GraphImportGraphDefWithResults(
                c_graph, serialized, options.options
            )
    finally:
        pywrap_tf_session.TF_DeleteBuffer(serialized)
    c_api_util.ScopedTFImportGraphDefResults(results)  # frees them
    return tuple(ops.Operation._from_c_op(c_op=op, g=graph) for op in graph.new_operations())
