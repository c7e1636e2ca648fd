"""The newest epoch of each namespace, and whether callers state epochs or only count weight changes."""

from histospec.server.stores.interface import ResponseBatch


class Epochs:
    """Knows how far each namespace is, and whose word advances it. Lives on the event loop.

    Args:
        newest: what the store has seen, by namespace.

    """

    def __init__(self, newest: dict[str, int]) -> None:
        self._newest = dict(newest)
        self._explicit: set[str] = set()  # namespaces in which a caller has given an epoch
        self.setbacks = 0
        """How often a drop or a rewind has taken newest epochs back: what was read before that no longer counts."""

    def newest(self, namespace: str) -> int:
        """The newest epoch that the namespace has seen; 0 at first."""
        return self._newest.get(namespace, 0)

    def give(self, namespace: str) -> None:
        """An explicit epoch was given; weight-change counts no longer advance the namespace."""
        self._explicit.add(namespace)

    def counted(self, namespace: str, epoch: int) -> int:
        """The epoch of a response that a worker's count says is of `epoch`; never older than the newest."""
        newest = self.newest(namespace)
        return newest if namespace in self._explicit else max(newest, epoch)

    def saw(self, batch: ResponseBatch) -> None:
        """Raises the newest epoch to those of the batch."""
        namespace = batch.problem.namespace
        self._newest[namespace] = max([self.newest(namespace), *(record.epoch for record in batch.records)])

    def merge(self, newest: dict[str, int], setbacks: int) -> None:
        """Takes what the store has seen, unless epochs have gone back since `setbacks` was read."""
        if setbacks == self.setbacks:
            self._newest.update({name: max(self.newest(name), epoch) for name, epoch in newest.items()})

    def forget(self, namespace: str) -> None:
        """The namespace is dropped: its epochs begin anew."""
        self._newest.pop(namespace, None)
        self._explicit.discard(namespace)
        self.setbacks += 1

    def rewind(self, namespace: str, epoch: int) -> None:
        """Responses newer than `epoch` are forgotten."""
        if namespace in self._newest:
            self._newest[namespace] = min(self._newest[namespace], epoch)
        self.setbacks += 1
