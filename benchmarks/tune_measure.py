"""The tuner's side of its child process: sends jobs, waits no longer than a limit, and knows which variant a silence is of."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict

COMMAND = (sys.executable, "-m", "benchmarks.tune_worker")
START_SECONDS = 180  # until the child has a CUDA context


class Lost(Exception):
    """The child hung or died."""


class MeasureError(Exception):
    """A workload that cannot be measured at all, whatever the variant."""


class Worker:
    def __init__(self, tree, gpu, limit, rounds, command=COMMAND):
        self.tree, self.gpu, self.limit, self.rounds, self.command = tree, gpu, limit, rounds, command
        self.process = None

    def measure(self, workload, variants):
        """{variant: {"us", "baseline_us", "ratio", "error"} or {"failed": why}}. A variant that the child is lost with has
        failed, and the others begin anew in another child."""
        found, left = {}, list(variants)
        while left:
            state = {"at": "", "found": {}}
            try:
                self._job(workload, left, state)
                return found | state["found"]
            except Lost as lost:
                self.close()
                at = state["at"]
                if at == "":
                    raise MeasureError(f"{workload.name}: eager PyTorch: {lost}") from lost
                if at is None and len(left) > 1:  # in the timing of all: each alone
                    for name in left:
                        found |= self.measure(workload, [name])
                    return found
                culprit = left[0] if at is None else at
                found[culprit] = {"failed": str(lost)}
                left.remove(culprit)
        return found

    def _job(self, workload, variants, state):
        """state: "at", the variant that was begun last; "found", results, complete with the last event."""
        if self.process is None:
            self._start()
        job = {"workload": asdict(workload), "variants": variants, "rounds": self.rounds}
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Lost(self._last_words()) from None
        found = state["found"]
        while True:
            event = self._next(self.limit)
            if "begin" in event:
                state["at"] = event["begin"]
            elif "times" in event:
                for name, times in event["times"].items():
                    found[name] |= times
                return
            elif event["end"] != "":
                found[event["end"]] = {name: event[name] for name in ("error", "failed") if name in event}
            elif "failed" in event:
                raise MeasureError(f"{workload.name}: eager PyTorch: {event['failed']}")

    def _start(self):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TILEOPS_")}
        self.words = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as the child
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.words}
        self.process = subprocess.Popen(self.command, cwd=self.tree, env=environment, text=True, **pipes)
        self.events = queue.Queue()
        threading.Thread(target=self._read, args=(self.process.stdout, self.events), daemon=True).start()
        try:
            seen = self._next(START_SECONDS)["gpu"]
        except Lost as lost:
            self.close()
            raise SystemExit(f"tune: the measuring process does not start: {lost}; the journal keeps what there is") from lost
        if seen != self.gpu:
            self.close()
            raise SystemExit(f"tune: this machine has {seen}; expected {self.gpu}, which --gpu names")

    @staticmethod
    def _read(lines, events):
        for line in lines:
            events.put(line)
        events.put(None)

    def _next(self, seconds):
        try:
            line = self.events.get(timeout=seconds)
        except queue.Empty:
            raise Lost(f"hangs: nothing for {seconds} s") from None
        if line is None:
            raise Lost(self._last_words())
        return json.loads(line)

    def _last_words(self):
        try:
            status = self.process.wait(5)
        except subprocess.TimeoutExpired:
            status = "still there"
        self.words.seek(0)
        said = [line.strip() for line in self.words.read().splitlines() if line.strip()]
        return f"dies (status {status}): {said[-1][:200] if said else 'without a word'}"

    def close(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.words.close()
        self.process = None
