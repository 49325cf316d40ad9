"""What the server says of itself in its OpenAPI file."""

from __future__ import annotations

import scripted


def test_the_openapi_file_has_the_statuses_that_are_answered() -> None:
    app, _ = scripted.app_of()
    paths = app.openapi()["paths"]
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages"} <= paths.keys()
    for operations in paths.values():
        for operation in operations.values():  # what FastAPI would answer alone, 422, isn't
            assert operation["responses"].keys() == {"200", "4XX", "5XX"}
