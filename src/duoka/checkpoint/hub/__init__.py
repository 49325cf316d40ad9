"""Hub: checkpoints by repository name, through huggingface_hub. No other package uses the Hub.

huggingface_hub determines the address, the token, offline mode and the cache (HF_ENDPOINT, HF_TOKEN
or a login, HF_HUB_OFFLINE, HF_HOME). Data from a server is untrusted, like a local file.

- `repo_name`: "org/name@revision", "modelscope:org/name"
- `listing`: the files of a repository at one commit, and their hashes
- `snapshot`: these files, fetched on demand; headers alone for a plan
- `modelscope`: the same of a repository on ModelScope
- `errors`: error messages and retries
"""

from .repo_name import HubName, parse_name
from .snapshot import HubSnapshot, open_snapshot

__all__ = ["HubName", "HubSnapshot", "open_snapshot", "parse_name"]
