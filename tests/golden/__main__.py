from tests.golden import ANSWERS, FOLDER, written

for name in ANSWERS:
    (FOLDER / f"{name}.txt").write_text(written(name), encoding="utf-8")
