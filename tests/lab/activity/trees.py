"""Write small data sets to disk, in the layouts of the sources."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SENSORS = ("acc_phone_clip", "acc_watch_clip", "gyro_clip", "orientation_clip")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def table(rows: np.ndarray, header: str = "") -> str:
    body = "\n".join(",".join(f"{cell:.9g}" for cell in row) for row in rows)
    return f"{header}\n{body}\n" if header else body + "\n"


def waves(samples: int, channels: int = 6, rate: float = 50.0, seed: int = 0) -> np.ndarray:
    """Sines of a different frequency per channel, with noise: `[samples, channels]`."""
    generator = np.random.default_rng(seed)
    t = np.arange(samples)[:, None] / rate
    return np.sin(2 * np.pi * t * (1 + np.arange(channels))) + 0.1 * generator.standard_normal((samples, channels))


def timed(samples: np.ndarray, rate: float = 50.0) -> np.ndarray:
    return np.column_stack([np.arange(len(samples)) / rate, samples])


def folder(root: Path, subjects: int = 5, samples: int = 80, header: str = "time,ax,ay") -> list[str]:
    """Write `s<subject>-<label>-<take>.csv`: every subject runs and walks twice. Returns the rows of the index."""
    rows = []
    for subject in range(subjects):
        for label in ("run", "walk"):
            for take in range(2):
                name = f"s{subject}-{label}-{take}.csv"
                seed = 100 * subject + 10 * take + len(label)
                write(root / name, table(timed(waves(samples, header.count(","), seed=seed)), header))
                rows.append(f"{name},{label},p{subject}")
    index(root, rows)
    return rows


def index(root: Path, rows: list[str], header: str = "path,label,subject") -> Path:
    return write(root / "index.csv", "\n".join([header, *rows]) + "\n")


def muwiges(root: Path, splits: tuple[str, ...] = (), subjects: int = 5, unit: float = 1.0) -> None:
    """Write two gestures per subject, below `data_train/subject1` and so on, or below `subject1` without `splits`."""
    for subject in range(1, subjects + 1):
        split = splits[subject % len(splits)] if splits else "."
        for gesture in (1, 12):
            rows = timed(waves(60, seed=subject + gesture))
            rows[:, 0] *= unit
            write(root / split / f"subject{subject}" / f"{gesture:02d}_{subject}.csv", table(rows))


def uestc(root: Path, clips: int = 5, base: int = 0) -> None:
    """Write raw integers of two activities, and three lists whose paths begin with other folders."""
    lists: dict[str, list[str]] = {"train.txt": [], "val.txt": [], "test.txt": []}
    for number, activity in ((1, "upstairs"), (32, "watch_TV")):
        for clip in range(clips):
            stem = f"{number}_{activity}/{number}_{activity}_2020_{clip:02d}"
            raw = np.round(waves(40, seed=number + clip) * [16384] * 6)
            write(root / "sensor" / f"{stem}.csv", table(raw))
            which = ("test.txt", "val.txt", "train.txt")[min(clip, 2)]
            lists[which].append(f"elsewhere/data/{stem} 100 40 {number - 1 + base}")
    for name, lines in lists.items():
        write(root / name, "\n".join(lines) + "\n")


def stamps(samples: int, rate: float, start: float = 0.0) -> list[str]:
    """Time stamps as in MMAct, which omits a fraction of 0."""
    times = start + np.arange(samples) / rate
    micros = np.round(times * 1e6).astype(np.int64)
    texts = []
    for value in micros:
        minutes, rest = divmod(int(value), 60_000_000)
        whole, fraction = divmod(rest, 1_000_000)
        texts.append(f"20180423_15:{minutes:02d}:{whole:02d}" + (f".{fraction:06d}" if fraction else ""))
    return texts


def mmact_file(path: Path, samples: int, rate: float, start: float = 0.0, seed: int = 0) -> Path:
    rows = waves(samples, 3, rate, seed)
    lines = [
        f"{stamp},{x:.6f},{y:.6f},{z:.6f}" for stamp, (x, y, z) in zip(stamps(samples, rate, start), rows, strict=True)
    ]
    return write(path, "\n".join(lines) + "\n")


def mmact(root: Path, subjects=(1, 2, 17), scenes=(1, 4), sessions=(1, 4, 5), seconds: float = 2.0) -> None:
    """Write `walking` and `Carrying_light`, whose case differs between sensors, at 100, 100, 50 and 50 Hz."""
    for subject in subjects:
        for scene in scenes:
            for session in sessions:
                for sensor, rate in zip(SENSORS, (100, 100, 50, 50), strict=True):
                    carrying = "Carrying_light" if sensor == "gyro_clip" else "carrying_light"
                    for seed, name in enumerate(("walking", carrying)):
                        path = Path(f"subject{subject}", f"scene{scene}", f"session{session}", f"{name}.csv")
                        mmact_file(root / sensor / path, int(seconds * rate), rate, 0.5, subject + seed)


MOTION_COLUMNS = ["", *(f"attitude.{angle}" for angle in ("roll", "pitch", "yaw"))] + [
    f"{sensor}.{axis}" for sensor in ("gravity", "rotationRate", "userAcceleration") for axis in "xyz"
]


def motionsense(root: Path, subjects: int = 5, samples: int = 60) -> Path:
    """Write two activities in a long and a short trial; returns the folder of the trials."""
    data = root / "A_DeviceMotion_data"
    for seed, trial in enumerate(("dws_1", "dws_11", "jog_9", "jog_16")):
        for subject in range(1, subjects + 1):
            rows = np.column_stack([np.arange(samples), waves(samples, 12, seed=10 * subject + seed)])
            write(data / trial / f"sub_{subject}.csv", table(rows, ",".join(MOTION_COLUMNS)))
    return data


def uci_har(root: Path, subjects: int = 5, samples: int = 240) -> None:
    """Write one experiment per subject: walking, sitting, a transition, laying; the test set is subjects 4 and 5."""
    lines = []
    for subject in range(1, subjects + 1):
        rows = waves(samples, seed=subject)
        for sensor, columns in (("acc", slice(0, 3)), ("gyro", slice(3, 6))):
            text = "".join(f"{x:.9g} {y:.9g} {z:.9g}\n" for x, y, z in rows[:, columns])
            write(root / "RawData" / f"{sensor}_exp{subject:02d}_user{subject:02d}.txt", text)
        segments = ((1, 1, 80), (4, 81, 160), (9, 161, 200), (6, 201, 240))
        lines += [f"{subject} {subject} {activity} {first} {last}" for activity, first, last in segments]
    write(root / "RawData" / "labels.txt", "\n".join(lines) + "\n")
    write(root / "Train" / "subject_id_train.txt", "1\n1\n2\n3\n")
    write(root / "Test" / "subject_id_test.txt", "4\n5\n")


def utd_mhad(root: Path, subjects: int = 8, samples: int = 40, compressed: bool = True) -> Path:
    """Write two actions in two trials of every subject; returns the folder of the files."""
    from scipy.io import savemat

    data = root / "Inertial"
    data.mkdir(parents=True)
    for action in (1, 27):
        for subject in range(1, subjects + 1):
            for trial in (1, 2):
                rows = waves(samples + subject, seed=100 * action + 10 * subject + trial)
                path = data / f"a{action}_s{subject}_t{trial}_inertial.mat"
                savemat(path, {"d_iner": rows}, do_compression=compressed)
    return data
