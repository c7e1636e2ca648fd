"""The figures of a replay for programs; docs/replay.md explains the fields."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from histospec.replay.arctic import Peer
from histospec.replay.calibration import deciles
from histospec.replay.result import Group, Options, Replay, Visit
from histospec.replay.scores import Score


def as_json(result: Replay, options: Options, file: str, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Returns every figure of the replay, and the assumptions about its files."""
    figures: dict[str, Any] = {
        "file": file,
        "notes": list(notes),
        "mode": options.mode,
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "max_response": options.max_response,
        "problems": result.problems,
        "problems_with_history": result.usable,
        "last_visit": _visit(result.last, options),
        "epochs": [{"epoch": visit.epoch, **_visit(visit, options)} for visit in result.epochs],
    }
    if result.groups:
        figures["siblings"] = [_group(group, options) for group in result.groups]
    if result.peer is not None:
        figures["compare"] = {"arctic": _peer(result.peer, result.last)}
    return figures


def _visit(visit: Visit, options: Options) -> dict[str, Any]:
    return {
        "problems": len(visit.cases),
        "history_tokens": sum(case.history_tokens() for case in visit.cases),
        "target_tokens": sum(case.target_tokens() for case in visit.cases),
        "costs": [_score(score, options) for score in visit.scores],
    }


def _score(score: Score, options: Options) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "verify_cost": score.verify_cost,
        "steps": score.steps,
        "drafted": score.drafted,
        "accepted": score.accepted,
        "tokens_per_step": score.tokens_a_step(),
        "drafted_per_step": score.drafted / score.steps,
        "speed_up": score.speed_up(),
        "speed_up_95": list(score.interval()),
        "speed_up_at": {f"{cost:g}": score.speed_up(cost) for cost in options.costs},
        "calibration": [asdict(decile) for decile in deciles(score.verified)],
    }
    if score.sources:
        figures["sources"] = {name: dict(counts) for name, counts in score.sources.items()}
    return figures


def _group(group: Group, options: Options) -> dict[str, Any]:
    return {
        "siblings": "all" if group.asked is None else group.asked,
        "history": group.history,
        "running": group.running(),
        "smaller_groups": group.smaller(),
        "costs": [
            {**_score(score, options), "group_tokens_per_step": score.group_tokens_a_step()} for score in group.scores
        ],
    }


def _peer(peer: Peer, headline: Visit) -> dict[str, Any]:
    costs = []
    for score in headline.scores:
        settings, best = peer.best(score.verify_cost)
        costs.append(
            {
                "verify_cost": score.verify_cost,
                "settings": settings._asdict(),
                "tokens_per_step": best.tokens_a_step(),
                "drafted_per_step": best.drafted / best.steps,
                "speed_up": best.speed_up(score.verify_cost),
                "gain": score.speed_up() / best.speed_up(score.verify_cost) - 1,
            }
        )
    return {"name": peer.name, "costs": costs}
