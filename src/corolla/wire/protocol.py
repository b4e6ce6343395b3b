"""The names under which peers speak to each other. The major version also stands in every frame."""

PROTOCOL_MAJOR = 1
CONTROL_PROTOCOL = f"/corolla/control/{PROTOCOL_MAJOR}"
"""One stream per (client, server): open, watch and close sessions."""
DATA_PROTOCOL = f"/corolla/data/{PROTOCOL_MAJOR}"
"""One stream per (session, link): steps and outputs."""
