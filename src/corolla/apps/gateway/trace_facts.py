"""Traces as facts for programs: `/api/v1/traces`, which `corolla trace --json` repeats."""

from typing import Any

from corolla.apps.gateway.traces import AnswerTrace, StepTrace, TracedRoute


def summary(trace: AnswerTrace) -> dict[str, Any]:
    """An answer without its steps."""
    return {
        "id": trace.id,
        "model": trace.model,
        "started_at": trace.started_at,
        "finish_reason": trace.finish_reason,
        "num_steps": trace.num_steps,
        "answered_tokens": trace.answered_tokens,
        "tokens_per_s": trace.tokens_per_s,
        "first_token_s": trace.first_token_s,
        "elapsed_s": trace.elapsed_s,
        "route": None if trace.route is None else route_as_json(trace.route),
        "route_changes": max(0, len(trace.routes) - 1),
    }


def whole(trace: AnswerTrace) -> dict[str, Any]:
    """An answer with every route, the runner-up, and the steps that were kept."""
    return {
        **summary(trace),
        "routes": [route_as_json(route) for route in trace.routes],
        "runner_up": None if trace.runner_up is None else route_as_json(trace.runner_up),
        "num_first_steps": trace.num_first_steps,
        "steps": [_step_as_json(step) for step in trace.steps],
    }


def route_as_json(route: TracedRoute) -> dict[str, Any]:
    return {
        "hops": [{"peer": hop.peer, "name": hop.name, "blocks": f"{hop.start}:{hop.end}"} for hop in route.hops],
        "links_s": list(route.links_s),
        "expected_s": route.expected_s,
    }


def _step_as_json(step: StepTrace) -> dict[str, Any]:
    return {
        "kind": step.kind,
        "tokens": step.tokens,
        "chunks": step.chunks,
        "route": step.route,
        "started_s": step.started_s,
        "total_s": step.total_s,
        "local_s": step.local_s,
        "return_s": step.return_s,
        "rest_s": step.rest_s,
        "hops": [
            {"queue_s": hop.queue_s, "compute_s": hop.compute_s, "send_s": hop.send_s, "wire_s": hop.wire_s}
            for hop in step.hops
        ],
    }
