"""A progress bar on standard error, drawn only on a terminal."""
import sys
import time

WIDTH = 30


class Progress:
    """Counts requests and tokens; the line is drawn at most ten times a second and removed at the end."""

    def __init__(self, total, is_on):
        self.total = total
        self.is_on = is_on and total > 0 and sys.stderr is not None and sys.stderr.isatty()
        self.start = time.monotonic()
        self.shown = 0.0
        self.is_shown = False

    def show(self, done, prompt_tokens, output_tokens):
        now = time.monotonic()
        if not self.is_on or (now - self.shown < 0.1 and done < self.total) or now - self.start < 0.2:
            return
        self.shown = now
        self.is_shown = True
        filled = WIDTH * done // self.total
        seconds = max(now - self.start, 1e-9)
        sys.stderr.write(
            f"\r[{'=' * filled}{' ' * (WIDTH - filled)}] {done}/{self.total} requests, "
            f"{prompt_tokens / seconds:.0f} prompt and {output_tokens / seconds:.0f} output tokens/s\033[K"
        )
        sys.stderr.flush()

    def close(self):
        if self.is_shown:
            sys.stderr.write("\n")
            sys.stderr.flush()
