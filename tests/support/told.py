"""What an engine tells the server of the drafts that it verified."""

from typing import Any


class Told:
    """Tokens, summed over requests and steps, from when it is made.

    history: of the server's drafts. drafted, accepted: of the model's own drafter, beyond what both drafted.
    """

    def __init__(self, rollouts: Any) -> None:
        """Listens to an engine in the tests' process."""
        self.history = self.drafted = self.accepted = 0
        client = rollouts.scheduler._sessions.client
        send = client.send

        def counted(*args: Any, **options: Any) -> Any:
            self.history += sum(options.get("verified") or ())
            self.drafted += sum(options.get("model_drafted") or ())
            self.accepted += sum(options.get("model_accepted") or ())
            return send(*args, **options)

        client.send = counted
