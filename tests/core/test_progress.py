"""Progress bars, with tqdm and without."""

import sys

from fbuf._core.progress import Bar


def shown(capsys, progress, total, unit="B"):
    bar = Bar(progress, "Pong/1", total, unit)
    bar(600)
    bar(400)
    bar.close()
    return capsys.readouterr().err


def test_bars(capsys, monkeypatch):
    assert "Pong/1: 100%" in (text := shown(capsys, True, 1000)) and "1.00k/1.00k" in text
    assert "1000 rows" in shown(capsys, True, 0, " rows")
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert shown(capsys, True, 2000) == "\rPong/1: 30 %\rPong/1: 50 %\n"
    assert shown(capsys, True, 0, " rows") == "\rPong/1: 600 rows\rPong/1: 1000 rows\n"
    assert shown(capsys, False, 1000) == ""


def test_a_callable_gets_what_is_done_and_the_total():
    seen = []
    bar = Bar(lambda done, total: seen.append((done, total)), "Pong/1", 1000)
    bar(600)
    bar(400)
    bar.close()
    assert seen == [(600, 1000), (1000, 1000)]
