"""The newest epoch of each namespace, and whether callers give epochs or only count weight changes."""

from histospec.server.stores.interface import ResponseBatch


class Epochs:
    """Knows the newest epoch of each namespace, and what may advance it. Used only on the event loop.

    Args:
        newest: the newest epochs in the store, by namespace.

    """

    def __init__(self, newest: dict[str, int]) -> None:
        self._newest = dict(newest)
        self._explicit: set[str] = set()  # namespaces in which a caller has given an epoch
        self.setbacks = 0
        """How many drops or rewinds have set newest epochs back. Epochs read before the last one are outdated."""

    def newest(self, namespace: str) -> int:
        """Returns the newest epoch of the namespace; 0 at first."""
        return self._newest.get(namespace, 0)

    def give(self, namespace: str) -> None:
        """Records that an explicit epoch was given; weight-change counts no longer advance the namespace."""
        self._explicit.add(namespace)

    def counted(self, namespace: str, epoch: int) -> int:
        """Returns the epoch for a response that a worker counts as of `epoch`; at least the newest epoch."""
        newest = self.newest(namespace)
        return newest if namespace in self._explicit else max(newest, epoch)

    def saw(self, batch: ResponseBatch) -> None:
        """Raises the newest epoch to that of the batch."""
        namespace = batch.problem.namespace
        self._newest[namespace] = max([self.newest(namespace), *(record.epoch for record in batch.records)])

    def merge(self, newest: dict[str, int], setbacks: int) -> None:
        """Adopts the newest epochs of the store, unless an epoch has gone back since `setbacks` was read."""
        if setbacks == self.setbacks:
            self._newest.update({name: max(self.newest(name), epoch) for name, epoch in newest.items()})

    def forget(self, namespace: str) -> None:
        """Removes a dropped namespace: its epochs start again."""
        self._newest.pop(namespace, None)
        self._explicit.discard(namespace)
        self.setbacks += 1

    def rewind(self, namespace: str, epoch: int) -> None:
        """Sets the newest epoch back to `epoch`."""
        if namespace in self._newest:
            self._newest[namespace] = min(self._newest[namespace], epoch)
        self.setbacks += 1
