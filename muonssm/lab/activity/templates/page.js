// What the page shows. Text of files and of the model goes in as text (`textContent`), never as HTML.
"use strict";

const MAX_ROWS = 2000; // windows in a table
const MAX_BEHIND = 5; // seconds of samples that may wait for the model
const SENSORS = {
  accelerationIncludingGravity: "acceleration",
  acceleration: "without gravity",
  gravity: "gravity",
  rotation: "rotation",
};
const element = (id) => document.getElementById(id);

function say(id, text, isWrong = false) {
  element(id).textContent = text;
  element(id).classList.toggle("wrong", isWrong);
}

function make(tag, text = "", name = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = name;
  return made;
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;

function showBars(id, probabilities) {
  const best = Math.max(...probabilities);
  element(id).replaceChildren(...SETTINGS.classes.flatMap((label, i) => {
    const bar = make("div", "", "bar"), filled = make("div");
    Object.assign(bar, { role: "meter", ariaLabel: label, ariaValueMin: "0", ariaValueMax: "1", ariaValueNow: String(probabilities[i]) });
    filled.style.width = `${100 * probabilities[i]}%`;
    bar.append(filled);
    const name = probabilities[i] === best ? "best" : "";
    return [make("span", label, name), bar, make("span", percent(probabilities[i]), name)];
  }));
}

function windowRow({ start, end, label, probability, probabilities }) {
  const row = make("tr");
  row.dataset.probabilities = JSON.stringify(probabilities);
  row.append(make("td", `${start} to ${end}`), make("td", label), make("td", percent(probability)));
  return row;
}

// ---- a recording

let filesInARow = 0; // a newer file replaces an older one that is still being classified

async function openFile(file) {
  const number = ++filesInARow;
  element("file-result").hidden = true;
  say("file-status", `Reading ${file.name} …`);
  try {
    if (file.size > MAX_BYTES) throw new DamagedFile(`must have ${MAX_BYTES} bytes or less, got ${file.size}`);
    const windows = readRecording(await file.arrayBuffer(), SETTINGS);
    const results = await classifier.classify(windows, (done) => {
      if (number === filesInARow) say("file-status", `${file.name}: ${done} of ${windows.length} windows`);
    });
    if (number === filesInARow) showRecording(file.name, results);
  } catch (error) {
    if (number === filesInARow) say("file-status", `${file.name} ${error.message}`, true);
  }
}

function showRecording(name, results) {
  const hidden = results.length - MAX_ROWS;
  const count = `${results.length} window${results.length === 1 ? "" : "s"}`;
  say("file-status", `${name}: ${count}${hidden > 0 ? `, the first ${MAX_ROWS} in the table` : ""}`);
  const mean = SETTINGS.classes.map((_, c) => results.reduce((sum, each) => sum + each.probabilities[c], 0) / results.length);
  showBars("file-bars", mean);
  element("file-windows").tBodies[0].replaceChildren(...results.slice(0, MAX_ROWS).map(windowRow));
  element("file-result").hidden = false;
}

function prepareFiles() {
  const drop = element("drop"), input = element("file");
  input.disabled = false;
  input.addEventListener("change", () => {
    if (input.files.length) openFile(input.files[0]);
    input.value = ""; // so that the same file can be chosen again
  });
  const over = (isOver) => (event) => {
    event.preventDefault();
    drop.classList.toggle("over", isOver);
  };
  for (const name of ["dragenter", "dragover"]) document.addEventListener(name, over(true));
  document.addEventListener("dragleave", over(false));
  document.addEventListener("drop", (event) => {
    over(false)(event);
    if (event.dataTransfer.files.length) openFile(event.dataTransfer.files[0]);
  });
}

// ---- this phone

// Windows as they come if the model can step; otherwise the whole recording when it is stopped.
class Live {
  constructor() {
    this.isStream = SETTINGS.mode === "windows" && SETTINGS.state !== null && SETTINGS.rate !== null;
    this.events = []; // of a recording
    this.samples = []; // that wait for the model
    this.work = null;
    this.wanted = true;
    this.hasEvents = false;
    this.restart();
  }

  restart() {
    this.samples.length = 0;
    this.last = null;
    if (!this.isStream) return;
    this.resampler = new Resampler(SETTINGS.rate);
    this.stream = new Stream(classifier);
  }

  // A motion event: its time in seconds, and one number per channel.
  add(seconds, values) {
    this.hasEvents = true;
    if (!this.isStream) {
      this.events.push({ seconds, values });
      say("live-status", `${this.events.length} samples; press Stop to classify them`);
      return;
    }
    if (this.last !== null && seconds - this.last > LONGEST_GAP) this.restart();
    this.last = seconds;
    this.samples.push(...this.resampler.push(seconds, values));
    if (this.samples.length > MAX_BEHIND * SETTINGS.rate) throw new Error("this device must classify faster than samples arrive, and does not");
    if (this.samples.length) this.work ??= this.drain();
  }

  async drain() {
    try {
      while (this.samples.length && this.wanted) {
        const stream = this.stream, result = await stream.feed(this.samples.shift());
        if (stream === this.stream && this.wanted) this.show(result, stream.count);
      }
    } catch (error) {
      stopLive(error);
    } finally {
      this.work = null;
    }
  }

  show(result, count) {
    if (result.isWhole) {
      const table = element("live-windows").tBodies[0];
      table.prepend(windowRow(result));
      if (table.rows.length > MAX_ROWS) table.lastElementChild.remove();
    }
    if (!result.isWhole && this.samples.length) return; // behind: draw later
    const filled = Math.min(1, (result.end + 1 - result.start) / SETTINGS.length);
    say("live-status", `${count} samples; window ${percent(filled)} full`);
    element("live-label").textContent = result.label;
    showBars("live-bars", result.probabilities);
    element("live-result").hidden = false;
  }

  // The samples of a recording as windows.
  recorded() {
    const times = Float64Array.from(this.events, (event) => event.seconds);
    const samples = SETTINGS.channels.map((_, c) => Float32Array.from(this.events, (event) => event.values[c]));
    return makeWindows(resample(sortByTime(samples, times), SETTINGS.rate), SETTINGS);
  }
}

let live = null, stopListening = null;

async function startLive() {
  element("live").disabled = true;
  say("live-status", "Waiting for the first motion event …");
  element("live-windows").tBodies[0].replaceChildren();
  element("live-result").hidden = true;
  try {
    const started = new Live();
    live = started;
    stopListening = await listenToMotion((event) => {
      if (live !== started) return;
      try {
        const motion = readEvent(event);
        if (!isEmpty(motion)) started.add(event.timeStamp / 1000, selectChannels(motion, SETTINGS.motion));
        else if (!started.hasEvents) say("live-status", "This device has sent an event without measurements: it may have no sensors.");
      } catch (error) {
        stopLive(error);
      }
    });
    element("live").textContent = "Stop";
  } catch (error) {
    stopLive(error);
  }
  element("live").disabled = false;
}

async function stopLive(error = null) {
  const ended = live;
  stopListening?.();
  live = stopListening = null;
  element("live").textContent = "Start";
  if (ended) ended.wanted = false;
  if (error) say("live-status", error.message, true);
  else if (ended && ended.isStream) say("live-status", "Stopped.");
  else if (ended) await showRecorded(ended);
}

async function showRecorded(ended) {
  try {
    const results = await classifier.classify(ended.recorded());
    element("live-windows").tBodies[0].replaceChildren(...results.slice(0, MAX_ROWS).map(windowRow));
    element("live-label").textContent = results[0].label;
    showBars("live-bars", results[0].probabilities);
    element("live-result").hidden = false;
    say("live-status", `${results.length} windows`);
  } catch (error) {
    say("live-status", `The recording ${error.message}`, true);
  }
}

function prepareSensors() {
  const choices = [["", "none (0)"]];
  for (const [sensor, name] of Object.entries(SENSORS)) {
    for (const axis of "xyz") choices.push([`${sensor}.${axis}`, `${name} ${axis}`]);
  }
  element("sensors").tBodies[0].append(...SETTINGS.motion.map((assigned) => {
    const row = make("tr"), select = make("select"), scale = make("input");
    select.append(...choices.map(([signal, name]) => new Option(name, signal, false, signal === (assigned.signal || ""))));
    select.ariaLabel = `sensor of ${assigned.channel}`;
    select.addEventListener("change", () => { assigned.signal = select.value || null; });
    Object.assign(scale, { type: "number", step: "any", value: String(Number(assigned.scale.toPrecision(6))), ariaLabel: `scale of ${assigned.channel}` });
    scale.addEventListener("change", () => { if (Number.isFinite(scale.valueAsNumber)) assigned.scale = scale.valueAsNumber; });
    const cells = [make("td", assigned.channel), make("td"), make("td")];
    cells[1].append(select);
    cells[2].append(scale);
    row.append(...cells);
    return row;
  }));
}

// ---- start

let classifier = null;

async function start() {
  prepareSensors();
  try {
    classifier = await loadClassifier(SETTINGS, PROGRAMS, RUNTIME);
  } catch (error) {
    say("status", `The model cannot run in this browser: ${error.message}`, true);
    document.body.dataset.state = "failed";
    return;
  }
  prepareFiles();
  element("live").disabled = false;
  element("live").addEventListener("click", () => (live ? stopLive() : startLive()));
  say("status", "The model is ready.");
  document.body.dataset.state = "ready";
}

start();
