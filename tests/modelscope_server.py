"""ModelScope on this machine, for tests: its listing and its files, with the Hub's misbehaviours.

Written from what the client, modelscope_hub 0.5, asks for and reads.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import hub_server
import huggingface_hub
import pytest
from hub_server import LARGE, Handler, HubServer, Repo

TOKEN = "ms-0123abcd-0123-4567-89ab-0123456789ab"
_API = re.compile(r"/api/v1/models/([^/]+/[^/]+)/repo(/files)?")


class ModelScope(Handler):
    def answer(self) -> None:
        self.hub.requests.append(self.request_now())
        url = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        match = _API.fullmatch(url.path)
        if match is None:
            self.fail(404, "no such address")
            return
        repo = self.hub.repos.get(match[1])
        file = asked.get("FilePath", "")
        misbehaviour = self.hub.take(*(("api",) if match[2] else ("resolve", file)))
        if misbehaviour is None:
            self.answer_for(repo, asked["Revision"], file)
        else:
            misbehaviour(self, lambda: self.answer_for(repo, asked["Revision"], file))

    def answer_for(self, repo: Repo | None, revision: str, file: str) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token != TOKEN:
            self.fail(401, "token is invalid or expired")
        elif repo is None or (repo.private and not token):
            self.fail(404, "record not found")
        elif revision not in repo.revisions:
            self.fail(404, "revision not found")
        elif not file:
            entries = [self.entry(repo, name) for name in repo.files]
            folders = [{"Path": "logs", "Name": "logs", "Type": "tree", "Size": 0, "Sha256": ""}]
            self.succeed({"Files": [*folders, *entries]})
        elif repo.gated:
            self.fail(403, "access to the model has to be requested")
        elif file not in repo.files:
            self.fail(404, "file not found")
        elif file.endswith(LARGE):
            place = f"{self.hub.storage_url}/{repo.etag(file)}?auth_key=verysecret"
            self.send(302, Location=place)
        else:
            self.send_file(repo.files[file])

    def entry(self, repo: Repo, name: str) -> dict[str, object]:
        content = repo.files[name]
        told = {
            "Path": name,
            "Name": name.rpartition("/")[2],
            "Type": "blob",
            "Size": len(content),
            "Sha256": hashlib.sha256(content).hexdigest(),
        }
        return told | repo.lies.get(name, {})

    def succeed(self, data: object) -> None:
        body = json.dumps({"Code": 200, "Data": data, "Success": True}).encode()
        self.send(200, body, Content_Type="application/json")

    def fail(self, status: int, message: str) -> None:
        body = json.dumps({"Code": 10010205001, "Message": message, "Success": False}).encode()
        self.send(status, body, Content_Type="application/json")


def use(server: HubServer, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client ask this server, without a login, and without pauses."""
    hub_server.use(server, scratch, monkeypatch)
    for name, value in environment(server, scratch).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("DOWNLOAD_RETRY_MAX_DELAY_SECONDS", "DOWNLOAD_INTEGRITY_RETRY_BACKOFF"):
        monkeypatch.setattr(f"modelscope_hub._download.{name}", 0.01)
    monkeypatch.setattr("modelscope_hub._legacy_api.REPO_TREE_PAGE_RETRY_MAX_DELAY_SECONDS", 0.01)


def environment(server: HubServer, scratch: Path) -> dict[str, str]:
    return {
        "MODELSCOPE_ENDPOINT": server.url,
        "MODELSCOPE_CACHE": str(scratch / "modelscope"),
        "MODELSCOPE_HOME": str(scratch / "home"),
        "MODELSCOPE_DOWNLOAD_INTRA_CLOUD": "0",
    }
