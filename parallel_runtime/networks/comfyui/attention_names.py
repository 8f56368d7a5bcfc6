"""Modules of ComfyUI whose attention asks no `transformer_options`: their name for it asks the running split."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...errors import UnsupportedModelError
from ...said import said
from .attention_operator import through_operator
from .token_split import running_split

_NAMES = ("optimized_attention", "optimized_attention_masked")
_CHOOSER = "optimized_attention_for_device"
_MARK = "_asks_the_split"


def ask_the_split(modules: Iterable[str]) -> None:
    """Have these modules' attention go over the tokens of all ranks wherever a block runs that is cut.

    Nothing undoes it: where no split is running, the name does what it did.

    Raises:
        UnsupportedModelError: a module calls its attention by no name that is known here.
    """
    for each in modules:
        module = importlib.import_module(each)
        names = [name for name in (*_NAMES, _CHOOSER) if name in vars(module)]
        if not names:
            raise UnsupportedModelError(
                said(
                    "{each} of this ComfyUI has no {names}, through which its tokens could be split.",
                    each=each,
                    names=" or ".join(_NAMES),
                ),
                "Set ulysses and ring to 1 in Parallel Config; CFG branches and pictures are still shared out.",
            )
        for name in names:
            function = vars(module)[name]
            if not hasattr(function, _MARK):
                setattr(module, name, (_choosing if name == _CHOOSER else _asking)(function))


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return through_operator(function, *args, **kwargs)
        split = running_split()
        if split is None or split.streams is None:
            return function(*args, **kwargs)
        if split.attention is None:  # over own tokens alone it would be another picture
            raise ValueError("no attention is set for the split that is running")
        return split.attention(function, *args, **kwargs)

    setattr(attend, _MARK, True)
    return attend


def _choosing(choose: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(choose)
    def chosen(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return _asking(choose(*args, **kwargs))

    setattr(chosen, _MARK, True)
    return chosen
