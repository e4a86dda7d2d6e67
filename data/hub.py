"""hub.py: files from the Hugging Face hub and elsewhere for get.py, by huggingface_hub.

Its http_get continues a part of a file through broken connections. What is added here: parts that
outlive a kill, checksums of the content, and a refusal at once where there is no network.
"""
import collections
import errno
import hashlib
import os
import re
import shutil
import socket
import sys
import time
import urllib.parse
import urllib.request

from vocabulary import Refusal

# sha: sha256 of the content, or of a small file on the hub git's sha1
Pinned = collections.namedtuple("Pinned", "url bytes sha")
PARTS = ".download"                                        # of a folder of shards: its downloads
RETRIES, TIMEOUT = 5, 10                                   # failures in a row; seconds of silence
BLOCK, CHUNK = 1 << 20, 1 << 18                            # bytes hashed, bytes received at once
OFFLINE = """  -> the same command continues with a network (proxy: https_proxy). Without one:
     python3 data/get.py debian --vocab bytes            text of Debian's packages, from apt
     make shard && ./shard --out DIR FILE...             your own text as bytes
     python3 data/get.py --vocab FOLDER --out DIR FILE... as tokens of a tokenizer.json, or of
                                                         vocab.json with merges.txt"""


def readable(size):
    return next(f"{size / unit:.1f} {name}"
                for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
                if size >= unit or unit == 1)


# ---- files that are whole or not there

def publish(file, part, path):
    """Gives a finished file its name: at every instant the name is a whole file or absent."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(part, path)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:                    # some file systems cannot sync folders
            raise
    finally:
        os.close(folder)


def write_whole(path, data):
    with open(path + ".tmp", "wb") as file:
        file.write(data)
        publish(file, path + ".tmp", path)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def is_whole(path, pinned):
    """Whether the file is there with the content that is pinned."""
    if not os.path.isfile(path) or os.path.getsize(path) != pinned.bytes:
        return False
    git = len(pinned.sha) == 40
    digest = hashlib.sha1(b"blob %d\0" % pinned.bytes) if git else hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest() == pinned.sha


def parts_bytes(folder):
    """Bytes of unfinished downloads."""
    return sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)
               if name.endswith(".part"))


def remove_parts(folder):
    shutil.rmtree(os.path.join(folder, PARTS), ignore_errors=True)


# ---- the network

def endpoint():
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def import_hub():
    try:
        import huggingface_hub
        import huggingface_hub.file_download
    except ImportError as error:
        raise Refusal(f"a download: expected huggingface_hub, found: {error}\n"
                      "  -> python3 -m pip install huggingface_hub") from None
    huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = CHUNK
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    return huggingface_hub


def reach(url):
    """Refuses at once if nothing answers there; a proxy is asked by the download itself."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    proxies = {parts.scheme, "all"} & urllib.request.getproxies().keys()
    if proxies and not urllib.request.proxy_bypass(host):
        return
    try:
        port = parts.port or {"http": 80}.get(parts.scheme, 443)
        socket.create_connection((host, port), TIMEOUT).close()
    except OSError as error:
        raise Refusal(f"{url}: expected a network, found: {error}\n{OFFLINE}") from None


def refuse(url, error):
    raise Refusal(f"{url}: expected a file, found: {str(error).strip() or type(error).__name__}\n"
                  "  -> the same command continues later; for a mirror of the hub HF_ENDPOINT (now "
                  f"{endpoint()}), for permission HF_TOKEN") from None


def is_final(error):
    """Whether another try gives the same: the server has answered that it will not."""
    code = getattr(getattr(error, "response", None), "status_code", 0)
    return 400 <= code < 500 and code not in (408, 416, 425, 429)


def fetch(pinned, part):
    """Downloads into a part, from its end on. A failure is repeated; RETRIES of them without a
    byte between are too many."""
    library, failures = import_hub(), 0
    own = pinned.url.startswith(endpoint() + "/")
    headers = library.utils.build_hf_headers() if own else {}
    while True:
        with open(part, "ab") as file:
            begun = file.tell()
            try:
                library.file_download.http_get(pinned.url, file, resume_size=begun, headers=headers,
                                               expected_size=pinned.bytes,
                                               displayed_filename=os.path.basename(part))
                return
            except Exception as error:                     # of the library's HTTP client
                file.flush()
                got = os.path.getsize(part)
                failures = 1 if got > begun else failures + 1
                if getattr(error, "errno", None) and not isinstance(error, ConnectionError):
                    raise                                  # of the disk
                if got >= pinned.bytes:
                    return
                if is_final(error) or failures > RETRIES:
                    refuse(pinned.url, error)
                print(f"{pinned.url}: {error}; retry {failures} of {RETRIES}", file=sys.stderr)
        time.sleep(2.0 ** (failures - 1))


def download(pinned, path):
    """Brings a file to `path` through a part beside it, which a later run continues, and checks its
    sha before it gets its name."""
    reach(pinned.url)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    part = path + ".part"
    print(f"{os.path.basename(path)}: {readable(pinned.bytes)} from {pinned.url}", file=sys.stderr)
    for _ in range(2):                                     # a part may be of another file
        whole = is_whole(part, pinned)
        if not whole and os.path.exists(part) and os.path.getsize(part) >= pinned.bytes:
            os.remove(part)
        if not whole:
            fetch(pinned, part)
        if is_whole(part, pinned):
            with open(part, "ab") as file:
                publish(file, part, path)
            return
        os.remove(part)
    raise Refusal(f"{pinned.url}: expected {pinned.bytes} bytes with checksum {pinned.sha}, found "
                  "others: the part is deleted\n  -> run the same command again; if this stays, "
                  "the file has changed or something between here and there rewrites it")


def files(repository, revision="main"):
    """The files of a dataset on the hub as {path: Pinned}."""
    library = import_hub()
    reach(endpoint())
    found = {}
    try:
        for entry in library.HfApi(endpoint=endpoint()).list_repo_tree(
                repository, recursive=True, revision=revision, repo_type="dataset"):
            if getattr(entry, "size", None) is not None:
                url = library.hf_hub_url(repository, entry.path, repo_type="dataset",
                                         revision=revision, endpoint=endpoint())
                sha = entry.lfs.sha256 if entry.lfs else entry.blob_id
                found[entry.path] = Pinned(url, entry.size, sha)
    except Exception as error:                             # of the library's HTTP client
        refuse(f"{endpoint()}/datasets/{repository}", error)
    return found


def get_tokenizer(repository, folder):
    """A model's tokenizer.json, with the file that names its special tokens if there is one."""
    library = import_hub()
    if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        reach(endpoint())
        for name in ("tokenizer_config.json", "tokenizer.json"):
            try:
                library.hf_hub_download(repository, name, local_dir=folder, endpoint=endpoint())
            except library.errors.EntryNotFoundError as error:
                if name == "tokenizer.json":
                    refuse(f"{endpoint()}/{repository}", error)
            except Exception as error:                     # of the library's HTTP client
                refuse(f"{endpoint()}/{repository}", error)
    return folder


def parse(address):
    """(repository, revision, pattern) of hf://datasets/OWNER/NAME[@REVISION][/PATTERN]."""
    match = re.fullmatch(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.*))?", address)
    if not match:
        raise Refusal(f"{address}: expected hf://datasets/OWNER/NAME[@REVISION][/PATTERN], found "
                      "something else\n  -> such as 'hf://datasets/allenai/c4/en/c4-train.*'")
    return match[1], urllib.parse.unquote(match[2] or "main"), match[3]
