"""Which torch calls count, what they are called, and a mode that numbers them in the order in which they run.

The level is the lowest that Python sees: a function of ``torch.nn.functional`` that is written in Python is opened, and
the built-in calls that it makes are numbered. Such a function asks first whether a mode wants the call; it is opened by
a copy of it that looks its names up in the same module but is told that no mode does.
"""

from __future__ import annotations

from abc import abstractmethod
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

_dispatch_depth: Any = torch._C._len_torch_dispatch_stack
_ASKS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}
_GETTERS = {"T", "mT", "H", "mH", "data", "real", "imag"}
"""Attributes that are new tensors; all others only tell something."""
_SETTERS = {"data", "real", "imag"}
_LOOKS = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "dim_order", "sym_size",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_pinned", "is_set_to", "is_same_size",
    "is_inference", "is_nonzero", "is_neg", "is_conj", "is_coalesced", "is_shared", "is_distributed", "is_tensor",
    "item", "tolist", "numpy", "data_ptr", "untyped_storage", "storage", "storage_type", "get_device", "has_names",
    "allclose", "equal", "can_cast", "result_type", "promote_types", "get_default_dtype", "typename", "names",
    "__len__", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__hash__", "__repr__", "__str__",
    "__format__", "__contains__", "__array__", "__dlpack__", "__dlpack_device__", "__reduce_ex__", "__reduce__",
    "__setstate__", "__deepcopy__", "__dir__", "_use_count", "_is_view", "_nnz", "_is_zerotensor",
    "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "grad",
    "_set_grad_enabled", "set_grad_enabled", "is_grad_enabled",
}  # fmt: skip
"""Calls that make and write no tensor, and those that run or arrange a backward."""
_STEADY = {
    "linear", "matmul", "__matmul__", "bmm", "mm", "addmm", "baddbmm", "einsum", "add", "__add__", "__radd__", "add_",
    "__iadd__", "sub", "__sub__", "__rsub__", "sub_", "mul", "__mul__", "__rmul__", "mul_", "__imul__", "div", "__truediv__",
    "__div__", "div_", "neg", "__neg__", "exp", "log", "sqrt", "rsqrt", "pow", "__pow__", "sin", "cos", "tanh", "sigmoid",
    "relu", "relu_", "gelu", "silu", "silu_", "softmax", "log_softmax", "cross_entropy_loss", "nll_loss_nd", "mse_loss",
    "layer_norm", "group_norm", "batch_norm", "rms_norm", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "max_pool2d",
    "avg_pool2d", "adaptive_avg_pool2d", "embedding", "cat", "stack", "chunk", "split", "unbind", "view", "view_as",
    "reshape", "flatten", "transpose", "permute", "contiguous", "expand", "expand_as", "squeeze", "unsqueeze", "T", "mT",
    "__getitem__", "__setitem__", "select", "narrow", "masked_fill", "masked_fill_", "where", "triu", "tril", "clone",
    "detach", "to", "float", "type", "sum", "mean", "var", "std", "max", "min", "amax", "argmax", "abs", "square", "clamp",
    "zeros", "ones", "full", "empty", "arange", "zeros_like", "ones_like", "fill_", "zero_", "copy_", "repeat_interleave",
}  # fmt: skip
"""Built-in calls that never draw: the generator is not looked at for them."""
PRODUCTS = {
    "linear", "matmul", "__matmul__", "bmm", "mm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
}  # fmt: skip
"""Built-in calls that save their operands, complete, before the work. Others may fill a tensor after saving it."""
STATISTICS = {"batch_norm": (3, 4, 5), "instance_norm": (3, 4, 5), "native_batch_norm": (3, 4, 5)}
"""Calls that write arguments without saying so: the places of the two statistics and of the flag that turns it on."""
_BACKENDS = PRODUCTS | {"layer_norm", "group_norm", "batch_norm", "rms_norm", "max_pool2d", "avg_pool2d"}
"""Those of the steady calls whose kernels are chosen by switches: libraries, precision."""
_PLAIN = ((), (torch.Tensor,))
"""Types that a call's tensors override it with, where none of them does."""
_REBINDS = {"Tensor.data.__set__", "Tensor.set_", "Tensor.resize_", "Tensor.resize_as_"}


class Kind:
    """What is known of a function.

    name       the same in every run and under fake tensors
    counts     whether its calls are numbered
    body       for a function that is opened: the copy that runs its body under the mode
    product    whether it is a product whose operands are saved before it is computed
    switches   whether more than grad mode, default dtype and threads may decide which kernel runs
    may_draw   whether a call may draw random numbers
    rebinds    whether it may give a tensor other memory
    statistics the places of arguments that it writes undeclared, with the flag; () if none
    """

    __slots__ = ("body", "counts", "may_draw", "name", "product", "rebinds", "statistics", "switches")

    def __init__(self, func: Any) -> None:
        short, self.name = _names(func)
        self.counts = _counts(func, short)
        self.body = _opened(func) if self.counts else None
        builtin = _is_builtin(func)
        self.product = builtin and short in PRODUCTS
        self.switches = short not in _STEADY - _BACKENDS or not builtin
        self.may_draw = short not in _STEADY or not builtin
        self.rebinds = self.name in _REBINDS
        self.statistics = STATISTICS.get(short, ()) if builtin else ()


_KINDS: dict[Any, Kind] = {}


def kind_of(func: Any) -> Kind:
    """The :class:`Kind` of a function, made once."""
    kind = _KINDS.get(func)
    if kind is None:
        kind = _KINDS[func] = Kind(func)
    return kind


def counts(func: Any) -> bool:
    """Whether calls of ``func`` are numbered: it may make or write a tensor, and runs no backward. Pure."""
    return kind_of(func).counts


def _names(func: Any) -> tuple[str, str]:
    short = str(getattr(func, "__name__", "") or type(func).__name__)
    owner = getattr(func, "__self__", None)
    if short in ("__get__", "__set__", "__delete__"):
        attribute = str(getattr(owner, "__name__", "attribute"))
        return attribute, f"Tensor.{attribute}" + ("" if short == "__get__" else f".{short}")
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return short, str(func)
    if hasattr(func, "__objclass__") or str(getattr(func, "__qualname__", "")).startswith("Tensor."):
        return short, f"Tensor.{short}"
    return short, short


def _counts(func: Any, short: str) -> bool:
    how = getattr(func, "__name__", "")
    if how == "__get__":
        return short in _GETTERS
    if how in ("__set__", "__delete__"):
        return how == "__set__" and short in _SETTERS
    return short not in _LOOKS


def _is_builtin(func: Any) -> bool:
    return not isinstance(func, (FunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket))


class _Names(dict[str, Any]):
    """The names of a module, live, in which no mode wants any call."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(dict.fromkeys(_ASKS, _nobody))
        # What Python itself looks up does not ask for missing names.
        self.update({name: value for name, value in names.items() if name.startswith("__")})
        self.names = names

    def __missing__(self, name: str) -> Any:
        return self.names[name]


def _nobody(*_: Any) -> bool:
    return False


def _opened(func: Any) -> Any:
    if not isinstance(func, FunctionType) or not _ASKS.intersection(func.__code__.co_names):
        return None
    copy = FunctionType(func.__code__, _Names(func.__globals__), func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


class Numbering(TorchFunctionMode):
    """Numbers the calls that count, from 0 at its entry on, and hands each to :meth:`call`.

    A function is not opened where another mode or a tensor class wants to see it whole, or where it calls itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.below: tuple[Any, ...] = ()
        self.ordinal = 0
        self._opening: list[Any] = []
        self._depth = 0

    def __enter__(self) -> Numbering:
        self.below = tuple(_get_current_function_mode_stack())
        self.ordinal, self._depth = 0, _dispatch_depth()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @abstractmethod
    def call(self, ordinal: int, kind: Kind, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run call number ``ordinal``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _KINDS.get(func)
        if kind is None:
            kind = kind_of(func)
        if not kind.counts or _dispatch_depth() < self._depth:  # that is the work of a dispatch mode, not the model's
            return func(*args, **kwargs) if kwargs else func(*args)
        if kind.body is not None and types in _PLAIN and not self.below and func not in self._opening:
            return self._open(kind.body, func, args, kwargs)
        ordinal, self.ordinal = self.ordinal, self.ordinal + 1
        return self.call(ordinal, kind, func, types, args, kwargs or {})

    def _open(self, body: Any, func: Any, args: Any, kwargs: Any) -> Any:
        self._opening.append(func)
        _push_mode(self)
        try:
            return body(*args, **kwargs) if kwargs else body(*args)
        finally:
            _pop_mode()
            self._opening.pop()


class CallCounter(Numbering):
    """Only numbers: what a recorder of operations runs under to tell which call each operation belongs to.

    names     of the calls so far, in order
    current   the number of the call that runs now; -1 between calls
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.current = -1

    def __enter__(self) -> CallCounter:
        super().__enter__()
        self.names, self.current = [], -1
        return self

    def call(self, ordinal: int, kind: Kind, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        self.names.append(kind.name)
        self.current = ordinal
        try:
            return func(*args, **kwargs)
        finally:
            self.current = -1
