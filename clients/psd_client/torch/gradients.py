"""The gradients of torch's parameters, in the client's flat buffers, from which they are sent.

As soon as back-propagation has finished a parameter's gradient, a hook copies it into the flat buffer, while it is still in the
processor's cache, and makes `.grad` a view of the buffer (places.py). So nothing is copied at the push, and changes that the
program makes to `.grad` before the step, such as clipping, happen in the buffer. If `.grad` cannot be a view (because of its
device, dtype or memory layout), the copy is made at the push; with `overlap`, also by the hook. With `overlap` each block is
sent when it is complete. If the push continues during the next forward pass, `.grad` remains torch's own tensor: only the hook
of the next back-propagation writes to the buffer, and it waits for the push before.

Must not know shards, sessions or optimizers' options.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest, InvalidTensor, NonFiniteGradient, RolledBack
from psd.contract.rows import TableRows
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.overlap_feed import Feed
from psd_client.torch.declaration import TorchDeclaration
from psd_client.torch.parameters import as_tensors, copy_all, is_alike
from psd_client.torch.places import Places
from psd_client.torch.uncompiled import uncompiled


@dataclass(frozen=True)
class Overlap:
    """Options for gradients that are sent before the step.

    Attributes:
        prepare: called when the first gradient is there. Returns a function that runs in a separate thread: it pushes what a
            feed gives, pulls, and reports each block of the parameters when it has been received.
        on_begin: called with each push's feed before the push begins. on_told: called when the error of a push is raised.
        in_background: the push continues during the next forward pass.
    """

    prepare: Callable[[], Callable[[Feed, Callable[[int], None]], None]]
    on_begin: Callable[[Feed], None]
    on_told: Callable[[], None]
    in_background: bool


class Gradients:
    """The gradients of the trained parameters of one model.

    Args:
        overlap: options for sending gradients early; None: nothing is sent before the step.
    """

    def __init__(self, declaration: TorchDeclaration, buffers: FlatBuffers, overlap: Overlap | None) -> None:
        self._declaration = declaration
        self._buffers = buffers
        self._overlap = overlap
        self._in_background = overlap is not None and overlap.in_background
        self._is_broken = False
        self._parameters = [declaration.parameters[i] for i in declaration.trained]
        views = as_tensors(buffers)
        self._views = [views[i] for i in declaration.trained]
        self._may_view = [
            is_alike(p, view) and not self._in_background for p, view in zip(self._parameters, self._views, strict=True)
        ]
        arrays = [buffers.views[i] for i in declaration.trained]
        self._places = Places(self._parameters, self._views, arrays, buffers.spaces)
        self._is_syncing = True
        self._push: _Push | None = None
        self._going_on: _Push | None = None  # of the step before
        self._lock = threading.RLock()  # back-propagation has a thread for each device
        hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _hook(weakref.WeakMethod(self._on_gradient), number)
            )
            for number, parameter in enumerate(self._parameters)
            if overlap is not None or self._may_view[number]
        ]
        self._remove_hooks = weakref.finalize(self, _remove, hooks)

    def close(self) -> None:
        """Leave the parameters alone from now on. Raises the error of the last push, unless it has been raised before."""
        self._remove_hooks()
        self.abandon()
        if self._in_background:
            self.settle()

    # -- at the step ---------------------------------------------------------------------------------------------------

    def gather(
        self, gradients: Sequence[torch.Tensor | None] | None = None, numbers: Sequence[int] | None = None
    ) -> NDArray[np.bool_] | None:
        """Put all gradients into the buffers; return which tensors have one, None for all.

        Args:
            gradients: gradients of the trained parameters; None: those in `.grad`.
            numbers: positions of the parameters to take, in ascending order; gradients of others stay as they are. None: all.

        Raises:
            InvalidTensor, InvalidRequest: a gradient is sparse, or a frozen parameter has one.
        """
        declaration = self._declaration
        if gradients is None:
            gradients = [parameter.grad for parameter in self._parameters]
        taken = range(len(self._views)) if numbers is None else numbers
        self._make_room(gradients, taken)
        sources, targets = [], []
        missing = [] if numbers is None else [declaration.trained[i] for i in range(len(self._views)) if i not in set(numbers)]
        for number in taken:
            index, gradient, view = declaration.trained[number], gradients[number], self._views[number]
            if gradient is None:
                missing.append(index)
            elif gradient is not view:
                self._check_kind(index, gradient, view)
                if self._places.has(gradient):
                    self._places.part()  # what the program finds in `.grad` after the step, too
                    gradient = gradient.clone()
                sources.append(gradient)
                targets.append(view)
        self._check_frozen()
        copy_all(targets, sources)
        return self._buffers.present_but(missing)

    def finish(self, take: Callable[[Callable[[bool], int | None]], None], tables: Sequence[Sequence[TableRows]] = ()) -> None:
        """With overlap: send the gradients that have not been sent yet, and take the new parameters.

        Args:
            take: takes the parameters, block by block; called with a function that gives the blocks, `_Push.next_block`.
            tables: gradients of rows, by shard.

        Raises:
            InvalidRequest: a gradient was changed after it had been sent.
            NonFiniteGradient: a shard has found NaN or infinity.
            the error with which the push has failed.
        """
        push = self._pushing()
        missing = []
        with self.abandoned_on_error():
            self._check_frozen()
            self._make_room([parameter.grad for parameter in self._parameters], range(len(self._views)))
            for number, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
                if number in push.sent:
                    self._check_unchanged(number, *push.sent[number])
                elif parameter.grad is None:
                    missing.append(self._declaration.trained[number])
                    view.zero_()
                else:  # a gradient that back-propagation did not make, or made under no_sync
                    self._send(number, push)
            push.feed.finish(self._buffers.present_but(missing), tables)
        self._push, self._going_on = None, push
        push.sent.clear()  # not to keep the gradients' memory through the next forward pass
        with self._noted_failure(push):
            take(push.next_block)
        if not self._in_background:
            self._going_on = None

    def _make_room(self, gradients: Sequence[torch.Tensor | None], numbers: Sequence[int]) -> None:
        """Free the places of those of these parameters whose gradients are elsewhere or missing, to write to them."""
        self._places.renew(numbers)
        for number in numbers:
            if gradients[number] is not self._views[number]:
                self._places.clear(number)

    def settle(self) -> None:
        """Wait until the push under way has ended; raise its error."""
        push = self._going_on
        if push is not None:
            with self._noted_failure(push):
                push.wait()
            self._going_on = None

    @contextmanager
    def _noted_failure(self, push: _Push) -> Iterator[None]:
        """Note and raise the failure of a push; this worker cannot go on if its gradients cannot be sent again."""
        try:
            yield
        except NonFiniteGradient as error:
            self._told()
            self._is_broken, self._going_on = True, None
            raise NonFiniteGradient(
                f"{error}; gradients of other parameters have been counted already (overlap), so this worker cannot take "
                "part in the job any more",
                **error.detail,
            ) from None
        except BaseException as error:
            if error is not push.error:  # Ctrl-C: the push continues, and the next one waits for it
                self._leave_views()
                raise
            self._told()
            self._going_on = None
            self._is_broken |= self._in_background and not isinstance(error, RolledBack)
            raise

    def _told(self) -> None:
        assert self._overlap is not None
        self._overlap.on_told()

    def _leave_views(self) -> None:
        """Make `.grad` independent of the buffers that are being sent, so that changes of it do no harm."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Give up the push under way if the body raises (with overlap)."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Give up the push under way (with overlap). Blocks already sent count, as if the worker had died at this point."""
        push, self._push = self._push, None
        if push is not None:
            self._is_broken = True
            push.feed.abort()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients in this block without sending them (with overlap); they are sent with the next ones outside."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    # -- during back-propagation ---------------------------------------------------------------------------------------

    def _on_gradient(self, number: int, parameter: torch.Tensor) -> None:
        self._places.renew((number,))
        gradient = parameter.grad
        if gradient is None or gradient.requires_grad:  # create_graph=True: the graph hangs on that very tensor
            return
        if self._may_view[number] and gradient is not self._views[number] and self._is_alike_now(number, gradient):
            if self._going_on is not None:
                with self._lock:
                    self.settle()
            self._places.put(number)
        if self._overlap is None or not self._is_syncing:
            return
        with self._lock, self.abandoned_on_error():
            push = self._pushing()
            if number in push.sent:
                raise InvalidRequest(
                    f"parameter {self._name(number)!r} has a second gradient in one step, and the first has been sent already "
                    "(overlap=True). To add up gradients of several backward(), put all but the last under optimizer.no_sync()"
                )
            self._send(number, push)

    def _is_alike_now(self, number: int, gradient: torch.Tensor) -> bool:
        """True unless the model has been moved to a device or converted to a dtype where `.grad` cannot be the view."""
        view = self._views[number]
        return gradient.layout is torch.strided and (gradient.dtype, gradient.device) == (view.dtype, view.device)

    def _pushing(self) -> _Push:
        assert self._overlap is not None
        if self._is_broken:
            raise InvalidRequest("overlap: an earlier push failed or was given up halfway; restart this worker")
        if self._push is None:
            self.settle()
            feed, begin = Feed(self._buffers.layout, in_background=self._in_background), self._overlap.prepare()
            self._overlap.on_begin(feed)
            self._push = _Push(feed, begin)
        return self._push

    def _send(self, number: int, push: _Push) -> None:
        self._places.clear(number)
        index, parameter, view = self._declaration.trained[number], self._parameters[number], self._views[number]
        gradient = parameter.grad
        assert gradient is not None
        if gradient is not view:
            self._check_kind(index, gradient, view)
            with torch.no_grad():
                view.copy_(gradient)
        push.sent[number] = gradient, gradient._version  # noqa: SLF001 - torch's count of changes in place
        push.feed.ready(index)

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_unchanged(self, number: int, sent: torch.Tensor, version: int) -> None:
        gradient = self._parameters[number].grad
        if gradient is not sent or gradient._version != version:  # noqa: SLF001
            raise InvalidRequest(
                f"parameter {self._name(number)!r}: its gradient was changed after it had been sent (overlap=True), by "
                "clipping or the like. Without overlap it leaves at step(); clip_norm= of distribute() clips on the shards"
            )

    def _check_frozen(self) -> None:
        declaration = self._declaration
        for index in declaration.frozen:
            if declaration.parameters[index].grad is not None:
                raise InvalidRequest(
                    f"parameter {declaration.tensors[index].name!r} was frozen when the job was declared and now has a "
                    "gradient; unfreeze parameters before distribute()"
                )

    def _check_kind(self, index: int, gradient: torch.Tensor, view: torch.Tensor) -> None:
        name = self._declaration.tensors[index].name
        if gradient.layout is not torch.strided:
            raise InvalidTensor(
                f"parameter {name!r}: its gradient is sparse; build the layer with sparse=False, or use "
                "psd_client.torch.Embedding, whose rows are on the shards and travel alone"
            )
        if torch.promote_types(gradient.dtype, view.dtype) != view.dtype and gradient.numel():
            raise InvalidTensor(
                f"parameter {name!r}: its gradient is {gradient.dtype}, but travels in the parameter's dtype, {view.dtype}; "
                "leave grad_dtype alone, or keep the parameter in that dtype, too"
            )

    def _name(self, number: int) -> str:
        return self._declaration.tensors[self._declaration.trained[number]].name


class _Push:
    """A push under way.

    Attributes:
        sent: the gradients that were sent, with torch's version of each, by number of the parameter. error: why the push
            failed, or None.
    """

    def __init__(self, feed: Feed, begin: Callable[[Feed, Callable[[int], None]], None]) -> None:
        self.feed = feed
        self.sent: dict[int, tuple[torch.Tensor, int]] = {}
        self._begin = begin
        self._received: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        # A daemon: the end of the program, which closes the connection, ends it.
        self._thread = threading.Thread(target=self._run, name="psd-overlap", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._begin(self.feed, self._received.put)
        except BaseException as error:  # noqa: BLE001 - raised by wait
            self.error = error
        finally:
            self._received.put(None)

    def next_block(self, is_waiting: bool) -> int | None:
        """The next block of the parameters that has been received.

        None: all have been received; or, if not waiting, none is there now. Raises the error of the push.
        """
        try:
            block = self._received.get(is_waiting)
        except queue.Empty:
            return None
        if block is None:
            self._received.put(None)  # also when asked again
            self.wait()
        return block

    def wait(self) -> None:
        """Wait until the push has ended; raise its error."""
        self._thread.join()
        if self.error is not None:
            raise self.error


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _hook(method: Any, number: int) -> Callable[[torch.Tensor], None]:
    """Make a hook that does not keep the optimizer alive."""

    @uncompiled
    def hook(parameter: torch.Tensor) -> None:
        on_gradient = method()
        if on_gradient is not None:
            on_gradient(number, parameter)

    return hook
