"""An exported folder becomes one commit of a Hub repository: whole or not at all.

The client's own `upload_folder` may split a folder over several commits; here there is one, so that no revision looks
half. Large files are sent before it, in parts; what has arrived is not sent again by a second try.
"""

import sys
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.hf_api import RepoFile

from heads.hub_client import attempt, checksum
from heads.read_block import MASK_FILE

# Files that exports of any format write: those of an earlier format go when another one is pushed over it.
OURS = {"config.json", "model.safetensors", MASK_FILE, "head.json", "head.safetensors", "manifest.json"}


def push(folder: Path, repo: str, revision: str | None = None, private: bool = True) -> str:
    """Upload `folder` to `repo`, made when it is not there, and return the commit's address.

    Raises ValueError in one sentence: no access, a public repository where a private one is meant, a Hub that stays
    unreachable, or a commit that holds other bytes than the folder.
    """
    api = HfApi()
    place = f"{repo}@{revision}" if revision else repo
    attempt(
        f"push={repo}: the repository could not be made", lambda: api.create_repo(repo, private=private, exist_ok=True)
    )
    info = attempt(f"push={repo}", lambda: api.model_info(repo))
    if private and not info.private:
        raise ValueError(f"push={repo}: this repository is public; set private=false to publish the head there")
    if revision and revision != "main":
        attempt(
            f"push={place}: the branch could not be made",
            lambda: api.create_branch(repo, branch=revision, exist_ok=True),
        )

    def commit() -> str:
        # Made anew for each try: the client then asks what has arrived, so a lost answer makes no second commit.
        there = {file.path for file in files_at(api, repo, revision)}
        local = sorted(path for path in folder.iterdir() if path.is_file())
        stale = sorted((there & OURS) - {path.name for path in local})
        operations: list[Any] = [CommitOperationDelete(name) for name in stale]
        operations += [CommitOperationAdd(path.name, path) for path in local]
        message = f"Draft head: {', '.join(path.name for path in local)}"
        return api.create_commit(repo, operations, commit_message=message, revision=revision).oid

    oid = attempt(f"push={place}: the upload failed", commit)
    check_commit(api, folder, repo, oid)
    url = f"{api.endpoint}/{repo}/tree/{oid}"
    print(f"export: pushed to {place}, {'private' if info.private else 'public'}: {url}", file=sys.stderr)
    return url


def files_at(api: HfApi, repo: str, revision: str | None) -> list[RepoFile]:
    return [file for file in api.list_repo_tree(repo, revision=revision) if isinstance(file, RepoFile)]


def check_commit(api: HfApi, folder: Path, repo: str, oid: str) -> None:
    """Every file of the folder lies in the commit, by its checksum. Raises ValueError naming one that differs."""
    there = {file.path: file for file in attempt(f"push={repo}", lambda: files_at(api, repo, oid))}
    for path in sorted(folder.iterdir()):
        found = there.get(path.name)
        known = None if found is None else found.blob_id if found.lfs is None else found.lfs.sha256
        if known is None or checksum(path, like=known) != known:
            raise ValueError(
                f"push={repo}: {path.name} in commit {oid[:8]} is not the file that was sent; push it again"
            )
