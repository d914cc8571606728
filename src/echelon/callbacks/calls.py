"""The callbacks of one run: created from objects and names, and called in the order of what happened."""

from __future__ import annotations

import collections
import inspect
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from echelon.callbacks.callback import Callback, Training
from echelon.errors import ConfigError, RunError, raised_at
from echelon.fields import guess
from echelon.names import resolve

HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
SLOW_S = 5.0  # a call that takes longer is reported: meanwhile, nothing that died is replaced


class CallbackList:
    """Calls the methods of callbacks. `note` says what happened; `run` makes the calls, outside of any handler."""

    def __init__(self, callbacks: Sequence[object] = ()) -> None:
        """A callback is an object, or the name of a class or function that makes one: "module:factory(size=3)"."""
        if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
            raise ConfigError(
                f"callbacks={callbacks!r:.80} is not a list of callbacks. Put it in one: callbacks=[...]."
            )
        self._callbacks = [_make(one) if isinstance(one, str) else one for one in callbacks]
        self._methods = [_methods_of(one) for one in self._callbacks]  # by the name of the hook
        self._due = collections.deque[tuple[str, Any]]()
        self._num_started = 0
        self._slow: set[str] = set()  # those that were reported
        self._training: Training

    def wants(self, hook: str) -> bool:
        """Returns whether a callback has the method `hook`."""
        return any(hook in methods for methods in self._methods)

    def start(self, training: Training) -> None:
        """Calls `on_start`, and passes `training` to this and all later calls."""
        self._training = training
        for methods in self._methods:
            if "on_start" in methods:
                self._call("on_start", methods["on_start"])
            self._num_started += 1

    def note(self, hook: str, what: Any) -> None:
        """Notes that `hook` is due, with `what` as its argument."""
        if self.wants(hook):
            self._due.append((hook, what))

    def run(self) -> None:
        """Makes the calls that are due."""
        while self._due:
            hook, what = self._due.popleft()
            for methods in self._methods:
                if hook in methods:
                    self._call(hook, methods[hook], what)

    def end(self, summary: dict[str, Any]) -> None:
        """Calls `on_end` of the callbacks that have started, all of them; then raises the first error."""
        ended, self._num_started = self._methods[: self._num_started], 0
        errors: list[RunError] = []
        for methods in ended:
            try:
                if "on_end" in methods:
                    self._call("on_end", methods["on_end"], summary)
            except RunError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def end_failed(self, summary: dict[str, Any], message: Callable[[str], None]) -> None:
        """Calls `on_end` after the run has failed; only shows what fails there, too."""
        try:
            self.end(summary)
        except RunError as error:
            message(str(error))

    def _call(self, hook: str, method: Callable[..., None], *what: Any) -> None:
        began = time.monotonic()
        name = f"{type(getattr(method, '__self__', method)).__name__}.{hook}"
        try:
            method(self._training, *what)
        except Exception as error:
            if isinstance(error, ConfigError) and hook == "on_start":  # a wrong setting: its message says all
                raise
            own = error.__traceback__ and error.__traceback__.tb_next  # without this frame
            chain = hook != "on_end"  # its context may be the failure of the run, which is shown already
            lines = traceback.format_exception(type(error), error, own or error.__traceback__, chain=chain)
            raise RunError(f"the callback {name} raised {type(error).__name__}:\n{''.join(lines).rstrip()}") from error
        took_s = time.monotonic() - began
        if took_s > SLOW_S and hook not in ("on_start", "on_end") and name not in self._slow:
            self._slow.add(name)
            self._training.message(
                f"the callback {name} took {took_s:.1f} s: meanwhile, no role that dies is replaced. Move long work to "
                "a thread or a process of its own"
            )


def _make(name: str) -> object:
    factory = resolve(name)
    if not callable(factory):
        return factory
    try:
        made: object = factory()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the callback {name} could not be made: {type(error).__name__}: {error}{raised_at(error)}."
        ) from error
    return made


def _methods_of(callback: object) -> dict[str, Callable[..., None]]:
    """Returns the methods of a callback by name, without those of `Callback` that it does not override."""
    found = {hook: getattr(callback, hook) for hook in HOOKS if callable(getattr(callback, hook, None))}
    if isinstance(callback, type):
        raise ConfigError(f"{callback!r:.80} is not a callback: pass {callback.__name__}().")
    for name in dir(callback):
        if name.startswith("on_") and name not in HOOKS and callable(getattr(callback, name)):
            raise ConfigError(
                f"the method {type(callback).__name__}.{name} is never called.{guess(name, list(HOOKS))} The hooks are "
                f"{', '.join(HOOKS)}; a method that you call yourself needs another name, such as _{name}."
            )
    if not found:
        raise ConfigError(f"{callback!r:.80} is not a callback: it needs one of {', '.join(HOOKS)}.")
    own = {hook: one for hook, one in found.items() if getattr(one, "__func__", None) is not getattr(Callback, hook)}
    for hook, method in own.items():
        names = list(inspect.signature(getattr(Callback, hook)).parameters)[1:]
        try:
            inspect.signature(method).bind(*names)
        except TypeError as error:
            raise ConfigError(
                f"{type(callback).__name__}.{hook}({', '.join(inspect.signature(method).parameters)}) cannot be called "
                f"as {hook}({', '.join(names)}): {error}."
            ) from None
        except ValueError:  # a function of C may have no signature
            pass
    return own
