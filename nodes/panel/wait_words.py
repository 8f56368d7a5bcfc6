"""What a node says while it waits, in the language of the canvas."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.client.life import Wait

WORDS: dict[str, dict[str, str]] = {
    "open": {
        "en": "Opening the model file.",
        "zh": "正在打开模型文件。",
        "ja": "モデルファイルを開いています。",
    },
    "turn": {
        "en": "Waiting for another prompt's turn on these GPUs ({seconds} s).",
        "zh": "正在等待另一个提示词用完这些 GPU（{seconds} 秒）。",
        "ja": "ほかのプロンプトがこの GPU を使い終わるのを待っています（{seconds} 秒）。",
    },
    "cancelled": {
        "en": "Waiting for the cancelled prompt's last step to end ({seconds} s).",
        "zh": "正在等待已取消提示词的最后一步结束（{seconds} 秒）。",
        "ja": "取り消されたプロンプトの最後のステップが終わるのを待っています（{seconds} 秒）。",
    },
    "pause": {
        "en": "Processes ended several times in a row: a pause before they start again ({seconds} s).",
        "zh": "进程连续多次终止：重新启动前稍作等待（{seconds} 秒）。",
        "ja": "プロセスが続けて何度も終了したため、再起動の前に少し待っています（{seconds} 秒）。",
    },
    "start": {
        "en": "Starting: {done} of {total} devices are ready ({seconds} s).",
        "zh": "正在启动：{total} 个设备中已就绪 {done} 个（{seconds} 秒）。",
        "ja": "起動しています：{total} 個のデバイスのうち {done} 個が準備完了（{seconds} 秒）。",
    },
    "weights": {
        "en": "Loading: {done} of {total} GB.",
        "zh": "正在加载：{done} / {total} GB。",
        "ja": "読み込み中：{done} / {total} GB。",
    },
    "measuring": {
        "en": "Measuring kernels and links, once for this machine ({seconds} s).",
        "zh": "正在测量内核与连接速度，每台机器只需一次（{seconds} 秒）。",
        "ja": "カーネルと接続の速さを測っています。この機械では一度だけです（{seconds} 秒）。",
    },
    "load": {
        "en": "Preparing the model ({seconds} s).",
        "zh": "正在准备模型（{seconds} 秒）。",
        "ja": "モデルを準備しています（{seconds} 秒）。",
    },
    "step": {
        "en": "Computing ({seconds} s).",
        "zh": "正在计算（{seconds} 秒）。",
        "ja": "計算しています（{seconds} 秒）。",
    },
}

_START_SECONDS = 10.0
"""About what a start takes: the bar nears its end with it, and never gets there before the ranks do."""


def say(reason: str, wait: Wait, seconds: float, language: str) -> str:
    """One sentence.

    Args:
        reason: a key of WORDS.
        seconds: that it has taken so far.
    """
    words = WORDS[reason][language]
    if reason == "weights":
        return words.format(done=round(wait.done / 1e9, 1), total=round(wait.total / 1e9, 1))
    return words.format(done=wait.done, total=wait.total, seconds=int(seconds))


def bar(reason: str, wait: Wait, seconds: float) -> float | None:
    """How far it is, from 0 to 1: of a start, whose parts are unlike, by the time that one takes; None where nobody
    knows."""
    if reason == "weights":
        return wait.done / max(wait.total, 1)
    if reason == "start":
        arrived = wait.done / wait.total if wait.total else 0.0
        return min(0.95, max(arrived, seconds / (seconds + _START_SECONDS)))
    return None
