"""The Hub: checkpoints by their id, through huggingface_hub. Nothing else talks to a server.

Where the Hub is, who asks it, whether it may be asked at all and where its files are kept is
huggingface_hub's to say (HF_ENDPOINT, HF_TOKEN or a login, HF_HUB_OFFLINE, HF_HOME). What a server
sends is believed as little as a file.

- `repo_name`: "org/name@revision"
- `listing`: the files of a repository at one commit, and their hashes
- `snapshot`: these files, fetched when needed; headers alone where those suffice
- `errors`: what goes wrong, in sentences, and what is asked again
"""

from .repo_name import HubName, parse_name
from .snapshot import HubSnapshot, open_snapshot

__all__ = ["HubName", "HubSnapshot", "open_snapshot", "parse_name"]
