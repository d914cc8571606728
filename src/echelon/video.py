"""Videos of episodes: pictures with a caption, written as mp4 and gif by ffmpeg, or shown in a window.

Pillow and imageio-ffmpeg, whose wheel contains ffmpeg, are the extra `video`; a window needs pygame. They are imported
on first use.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from echelon.errors import ConfigError, RunError

Array = np.ndarray[Any, Any]
NUM_COLUMNS = 3  # of a caption
BACKGROUND, NAME_COLOUR, VALUE_COLOUR = (18, 18, 24), (150, 150, 160), (240, 240, 240)
DEFAULT_FPS = 30.0  # of environments that do not name theirs
MIN_FPS, MAX_FPS = 0.1, 240.0
MIN_WIDTH, MAX_WIDTH = 32, 4096  # pixels
FINAL_DELAY_CS = 100  # hundredths of a second for which a gif shows its last picture, before it starts again
MP4 = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "18", "-movflags", "+faststart")
LOSSLESS = ("-c:v", "libx264rgb", "-qp", "0", "-preset", "ultrafast")
SUFFIXES = (".mp4", ".gif")
DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")  # one of them is set where a window can open


@dataclass(frozen=True, slots=True)
class VideoConfig:
    """Where and how episodes are shown."""

    output: str = ""  # FILE.mp4, FILE.gif, or FILE for both; "": in the run folder
    window: bool = False  # show a window; writes files only if `output` is given
    fps: float | None = None  # steps per second; None: those of the environment
    width: int = 640  # pixels, of the mp4 and the window
    gif_width: int = 256
    gif_fps: float = 15.0  # at most: the gif leaves steps out
    overlay: bool = True  # whether there is a caption

    def __post_init__(self) -> None:
        for name, fps in (("fps", self.fps), ("gif_fps", self.gif_fps)):
            if fps is not None and not MIN_FPS <= fps <= MAX_FPS:
                raise ConfigError(f"{name}={fps:g} must be between {MIN_FPS:g} and {MAX_FPS:g} steps per second.")
        for name in ("width", "gif_width"):
            if not MIN_WIDTH <= getattr(self, name) <= MAX_WIDTH:
                raise ConfigError(f"{name}={getattr(self, name)} must be between {MIN_WIDTH} and {MAX_WIDTH:,} pixels.")


class Cell(NamedTuple):
    """One entry of a caption; it is as wide as `span` columns."""

    name: str
    value: str
    span: int = 1


Caption = Sequence[Sequence[Cell]]  # rows


class Screen(Protocol):
    """Shows the pictures of episodes, all of the same size and with equally many rows of caption."""

    @property
    def is_closed(self) -> bool:
        """Whether the user closed it, so that nothing more needs to be shown."""
        ...

    def show(self, picture: Array, caption: Caption) -> None:
        """Shows a picture (H, W, 3) of bytes."""
        ...

    def finish(self, report: Callable[[str], None]) -> None:
        """Completes its file, if it writes one, and reports that."""
        ...

    def close(self) -> None:
        """Removes what was not completed."""
        ...


def video_files(config: VideoConfig, default: Path) -> list[Path]:
    """Returns the files to write; raises ConfigError if a package is missing or they cannot be written.

    The folder of `default` need not exist.
    """
    if config.window:
        _pygame()
        if not config.output:
            return []
    _ffmpeg()
    _pillow("Image")
    target = Path(config.output) if config.output else default
    files = [target] if target.suffix in SUFFIXES else [Path(f"{target}{suffix}") for suffix in SUFFIXES]
    folder = target.absolute().parent
    folder = folder if config.output or folder.exists() else folder.parent
    if taken := next((path for path in files if path.is_dir() or not os.access(folder, os.W_OK)), None):
        raise ConfigError(f"{taken} cannot be written. Give a file in an existing, writable folder with --output.")
    return files


def make_screens(config: VideoConfig, files: Sequence[Path], fps: float, title: str) -> list[Screen]:
    """Returns a window and writers of `files`, as `config` asks; `fps` is that of the environment, 0 if unknown."""
    fps = config.fps or fps or DEFAULT_FPS
    screens: list[Screen] = [VideoWindow(title, fps, config.width)] if config.window else []
    for path in files:
        is_gif = path.suffix == ".gif"
        screens.append(GifFile(path, fps, config) if is_gif else Mp4File(path, fps, config))
    return screens


def compose(picture: Array, caption: Caption, width: int) -> Any:
    """Returns a Pillow image about `width` wide: the picture, and the caption below it.

    Wider pictures are shrunk to `width`; others are enlarged by a whole factor, so that pixels stay sharp.
    """
    image_module, draw_module = _pillow("Image"), _pillow("ImageDraw")
    image = image_module.fromarray(picture)
    if image.width > width:
        image = image.resize((width, max(1, round(image.height * width / image.width))), image_module.Resampling.BOX)
    else:
        factor = max(1, round(width / image.width))
        image = image.resize((factor * image.width, factor * image.height), image_module.Resampling.NEAREST)
    size = max(9, image.width // 24)
    line, margin = 4 * size // 3, size // 2
    height = image.height + (line * len(caption) + margin if caption else 0)
    canvas = image_module.new("RGB", (_even(image.width), _even(height)), BACKGROUND)
    canvas.paste(image, (0, 0))
    draw, font = draw_module.Draw(canvas), _font(size)
    column = (image.width - margin) / NUM_COLUMNS
    for i, row in enumerate(caption):
        place, y = 0, image.height + margin // 2 + i * line
        for name, value, span in row:
            x, room = margin + place * column, span * column - margin
            indent = font.getlength(f"{name} ")
            draw.text((x, y), name, NAME_COLOUR, font)
            draw.text((x + indent, y), _clipped(value, font, room - indent), VALUE_COLOUR, font)
            place += span
    return canvas


class Encoder:
    """An ffmpeg process that encodes the images it is given into one file."""

    def __init__(self, path: Path, fps: float, options: Sequence[str]) -> None:
        self.path, self._fps, self._options = path, fps, options
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)

    def write(self, image: Any) -> None:
        if self._process is None:
            rate = str(Fraction(self._fps).limit_denominator(1000))
            source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{image.width}x{image.height}", "-r", rate]
            command = [*_ffmpeg(), *source, "-i", "-", *self._options, str(self.path)]
            # In a session of its own: Ctrl-C in the terminal is for this process, which then ends ffmpeg.
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": self._errors}
            self._process = subprocess.Popen(command, start_new_session=True, **streams)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(image.tobytes())
        except BrokenPipeError:
            self.finish()  # raises the reason
            raise

    def finish(self) -> None:
        """Waits until the file is complete."""
        assert self._process is not None, "nothing was written"
        self._process.communicate()
        if self._process.returncode:
            self._errors.seek(0)
            raise _failed(self.path, self._errors.read())

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        self._errors.close()


class _File:
    """A file that is encoded in a temporary folder beside it, and takes its place when it is complete."""

    is_closed = False

    def __init__(self, path: Path, fps: float, options: Sequence[str], name: str) -> None:
        self.path, self._is_new_folder = path, not path.parent.exists()
        path.parent.mkdir(exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix=".tmp-video-", dir=path.absolute().parent)
        self._parts = Path(self._folder.name)
        self._encoder = Encoder(self._parts / name, fps, options)

    def _publish(self, complete: Path, report: Callable[[str], None]) -> None:
        complete.replace(self.path)
        report(f"wrote {self.path} ({self.path.stat().st_size / 1e3:,.0f} KB)")

    def close(self) -> None:
        self._encoder.close()
        self._folder.cleanup()
        if self._is_new_folder:
            with contextlib.suppress(OSError):  # it holds the video
                self.path.parent.rmdir()


class Mp4File(_File):
    """An mp4 of every picture."""

    def __init__(self, path: Path, fps: float, config: VideoConfig) -> None:
        super().__init__(path, fps, MP4, "video.mp4")
        self._width = config.width

    def show(self, picture: Array, caption: Caption) -> None:
        self._encoder.write(compose(picture, caption, self._width))

    def finish(self, report: Callable[[str], None]) -> None:
        self._encoder.finish()
        self._publish(self._encoder.path, report)


class GifFile(_File):
    """A small gif of every n-th picture, with one palette for all of them, which is made at the end."""

    def __init__(self, path: Path, fps: float, config: VideoConfig) -> None:
        self._width, self._stride, self._count = config.gif_width, math.ceil(fps / config.gif_fps), 0
        super().__init__(path, fps / self._stride, LOSSLESS, "pictures.mkv")

    def show(self, picture: Array, caption: Caption) -> None:
        if self._count % self._stride == 0:
            self._encoder.write(compose(picture, caption, self._width))
        self._count += 1

    def finish(self, report: Callable[[str], None]) -> None:
        report(f"writing {self.path}")
        self._encoder.finish()
        source, palette, gif = ["-i", str(self._encoder.path)], self._parts / "palette.png", self._parts / "video.gif"
        self._convert([*source, "-vf", "palettegen"], palette)
        use = "paletteuse=dither=none:diff_mode=rectangle"  # only what changed is stored
        options = ["-lavfi", use, "-final_delay", str(FINAL_DELAY_CS)]
        self._convert([*source, "-i", str(palette), *options], gif)
        self._publish(gif, report)

    def _convert(self, options: Sequence[str], target: Path) -> None:
        command = [*_ffmpeg(), *options, str(target)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            raise _failed(self.path, done.stderr)


class VideoWindow:
    """A window on this machine's display; closing it, Escape or Q end the episodes."""

    def __init__(self, title: str, fps: float, width: int) -> None:
        self._pygame = _pygame()
        self._fps, self._width, self._title, self.is_closed = fps, width, title, False
        try:
            self._pygame.display.init()
        except self._pygame.error as error:
            raise ConfigError(f"no window can be opened: {error}; without --window, files are written.") from error
        self._clock = self._pygame.time.Clock()

    def show(self, picture: Array, caption: Caption) -> None:
        pygame, image = self._pygame, compose(picture, caption, self._width)
        surface = pygame.display.get_surface() or pygame.display.set_mode(image.size)
        pygame.display.set_caption(self._title)
        surface.blit(pygame.image.frombuffer(image.tobytes(), image.size, "RGB"), (0, 0))
        pygame.display.flip()
        self._clock.tick(self._fps)
        for event in pygame.event.get():
            ends = event.type == pygame.KEYDOWN and event.key in (pygame.K_ESCAPE, pygame.K_q)
            self.is_closed |= ends or event.type == pygame.QUIT

    def finish(self, report: Callable[[str], None]) -> None:
        pass

    def close(self) -> None:
        self._pygame.display.quit()


def _pygame() -> Any:
    """Returns pygame; raises ConfigError if it is missing or there is no display."""
    if not any(os.environ.get(name) for name in DISPLAYS):
        raise ConfigError("there is no display for a window (DISPLAY is not set); without --window, files are written.")
    return _imported("pygame", "a window", "pygame")


def _pillow(module: str) -> Any:
    return _imported(f"PIL.{module}", "a video", "pillow")


def _imported(module: str, what: str, package: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'{what} needs the package {package}, which is not installed: pip install "echelon[video]".'
        ) from error


def _ffmpeg() -> list[str]:
    """Returns the start of every ffmpeg command."""
    try:
        program = _imported("imageio_ffmpeg", "a video", "imageio-ffmpeg").get_ffmpeg_exe()
    except RuntimeError as error:  # a platform for which its wheel has no ffmpeg
        raise ConfigError(f"a video needs ffmpeg: {error} Name the program in IMAGEIO_FFMPEG_EXE.") from error
    return [program, "-loglevel", "error"]


def _failed(path: Path, errors: bytes) -> RunError:
    lines = errors.decode(errors="replace").strip().splitlines()
    return RunError(f"ffmpeg could not write {path}: {lines[-1] if lines else 'it was killed'}.")


@cache
def _font(size: int) -> Any:
    return _pillow("ImageFont").load_default(size)


def _clipped(text: str, font: Any, room: float) -> str:
    """Returns as much of `text` as fits into `room` pixels."""
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(f"{text}...") > room:
        text = text[:-1]
    return f"{text}..."


def _even(size: int) -> int:
    return size + size % 2  # yuv420p stores colours for squares of 2x2 pixels
