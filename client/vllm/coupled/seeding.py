"""Gives each request the seed it is sampled with: its own, or the seed of its sample."""

import copy
import struct
import uuid
from collections import OrderedDict
from hashlib import blake2b

import numpy as np

from histospec.client.engines.options import RequestOptions
from histospec.client.seeds import SeedPolicy
from histospec.client.vllm.interface import Request

GREEDY = 1e-5  # as in vLLM: lower temperatures mean greedy decoding
REMEMBERED = 65_536  # for how many problems siblings are counted


class RequestSeeds:
    """Gives every sampled request of an engine a seed. Only the scheduler's thread may use it.

    A request may give the number of its sample ("sample"). The trainer must then give each sibling another number, over
    all engines. Otherwise the engine counts siblings as they come, and uses seeds of its own: if siblings on two
    engines shared a seed, they would be the same response.
    """

    def __init__(self, namespace: str, policy: SeedPolicy) -> None:
        self._policy = policy
        self._namespace = namespace.encode()
        self._engine = uuid.uuid4().bytes
        self._counted: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # problem -> epoch, siblings seen in it

    def give(self, request: Request, options: RequestOptions, epoch: int) -> int | None:
        """Returns the seed of a request, and sets it in its sampling parameters; None if the request is greedy.

        Call it before the workers get the request.

        Args:
            request: vLLM's request.
            options: its options.
            epoch: version of the policy that will sample it.
        """
        parameters = request.sampling_params
        if parameters is None or parameters.temperature < GREEDY:
            return None
        if parameters.seed is None:
            seed = self._policy.seed(self._sample(request, options, epoch), epoch)
            parameters = copy.copy(parameters)  # siblings may share them
            parameters.seed = seed
            getattr(parameters, "__dict__", {}).pop("sampling_type", None)  # what vLLM derives from it, kept there
            request.sampling_params = parameters
        return parameters.seed

    def _sample(self, request: Request, options: RequestOptions, epoch: int) -> bytes:
        problem = self._problem(request, options)
        if options.sample is not None:
            return problem + struct.pack("<q", options.sample)
        of, number = self._counted.pop(problem, (epoch, 0))
        number = number if of == epoch else 0
        self._counted[problem] = epoch, number + 1
        if len(self._counted) > REMEMBERED:
            self._counted.popitem(last=False)
        return problem + self._engine + struct.pack("<q", number)

    def _problem(self, request: Request, options: RequestOptions) -> bytes:
        digest = blake2b(struct.pack("<q", len(self._namespace)) + self._namespace, digest_size=16)
        if options.problem is not None:
            digest.update(b"id" + options.problem.encode())
        else:
            prompt = request.prompt_token_ids or []
            digest.update(np.asarray(prompt[: len(prompt) - (options.generated or 0)], "<i4").tobytes())
        return digest.digest()
