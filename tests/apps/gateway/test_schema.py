"""The API as it describes itself: whatever fits the description, or does not, gets an answer that fits it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Fronts = Callable[..., Any]
EXAMPLES = 10
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # fifty processor seconds; a busy machine is slow, not wrong
def test_fuzzed_requests_get_what_the_description_says(front: Fronts, tmp_path: Path) -> None:
    async def told() -> None:
        async with front(keep_s=0, default_new_tokens=4, cache_tokens=1 << 20) as it:
            described = (await it.http.get("/openapi.json")).json()
            schemas = described["components"]["schemas"]
            for kind in ("ChatRequest", "CompletionRequest"):  # else nearly all ask for models that there are not
                fields = schemas[kind]["properties"]
                fields["model"] = {"enum": ["tiny"]}
                for limit in {"max_tokens", "max_completion_tokens"} & fields.keys():
                    fields[limit] = {"type": "integer", "minimum": 1, "maximum": 8}
            (tmp_path / "api.json").write_text(json.dumps(described))
            command = [
                str(Path(sys.executable).parent / "schemathesis"), "run", str(tmp_path / "api.json"), "--url", it.url,
                "--max-examples", str(EXAMPLES), "--checks", CHECKS, "--phases", "coverage,fuzzing",
                "--request-timeout", "300", "--seed", "1", "--generation-database", "none", "--no-color",
            ]  # fmt: skip
            run = asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=1700, cwd=tmp_path, check=False
            )
            done = await run
            print(done.stdout[-6000:], done.stderr[-2000:])
            assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
            answers = it.gateway.metrics.registry.get_sample_value(
                "corolla_gateway_requests_total", {"endpoint": "/v1/chat/completions", "status": "200"}
            )
            assert answers, "some requests must have reached the model"
            assert it.gateway.limits.active == 0

    asyncio.run(told())
