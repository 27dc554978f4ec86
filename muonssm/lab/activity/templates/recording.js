// A recording in a CSV file to windows of samples, with the numbers that `muonssm predict` gets: the same rules for
// headers, times, resampling and windows, in float64 and float32 where Python has them (csv_files.py, recordings.py and
// windows.py of muonssm.lab.activity).
"use strict";

const MAX_BYTES = 2 ** 28; // of a file; a browser holds all of it
const MAX_LINE = 1000000;
const MAX_GROWTH = 100; // resampling to more than 100 times as many samples means that the time stamps are wrong
const MAX_SAMPLES = 20000000; // after resampling
const MAX_RATE = 1e9;
const SECONDS_PER_UNIT = { s: 1, ms: 1e-3, us: 1e-6, ns: 1e-9 };
const TIME_COLUMN = /^(?:t|ts|time|timestamp|datetime)(?:[ _]?[([]?(s|ms|us|ns)[)\]]?)?$/i;
const NUMBER = /^[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?$/i;
const INFINITE = /^([+-]?)inf(?:inity)?$/i;
const DATE = /^(\d{4})-(\d\d)(?:-(\d\d)(?:[T ](\d\d)(?::(\d\d)(?::(\d\d)(?:\.(\d*))?)?)?)?)?$/;

// A file that cannot be used. The message follows the file's name: "must be ..., got ...".
class DamagedFile extends Error {}

// ---- text to cells

function decode(bytes) {
  if (bytes.byteLength > MAX_BYTES) {
    throw new DamagedFile(`must have ${MAX_BYTES} bytes or less, got ${bytes.byteLength}`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new DamagedFile("must be UTF-8 text, got bytes that are not");
  }
  if (text.includes("\0")) throw new DamagedFile("must be UTF-8 text, got a zero");
  return text;
}

// The header (null if there is none) and the rows of cells. A header is a first row without a number.
function readCells(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const long = lines.findIndex((line) => line.length > MAX_LINE);
  if (long >= 0) throw new DamagedFile(`must have lines of ${MAX_LINE} characters or less, got more in line ${long + 1}`);
  const filled = lines.filter((line) => line.trim());
  if (!filled.length) throw new DamagedFile("is empty");
  const count = (delimiter) => filled[0].split(delimiter).length;
  const delimiter = [",", ";", "\t"].reduce((best, each) => (count(each) > count(best) ? each : best));
  const rows = filled.map((line, i) => splitLine(line, delimiter, i + 1));
  const uneven = rows.findIndex((row) => row.length !== rows[0].length);
  if (uneven >= 0) {
    const got = `${rows[uneven].length} in row ${uneven + 1}`;
    throw new DamagedFile(`must be a table: the first row has ${rows[0].length} columns, got ${got}`);
  }
  if (rows[0].some((cell) => parseNumber(cell) !== null)) return { header: null, rows };
  if (rows.length === 1) throw new DamagedFile("has a header but no rows");
  return { header: rows[0].map((cell) => cell.trim()), rows: rows.slice(1) };
}

// Quotes count at the start of a cell, and two of them inside are one.
function splitLine(line, delimiter, number) {
  if (!line.includes('"')) return line.split(delimiter);
  const cells = [];
  let cell = "", quoted = false, start = true;
  for (let i = 0; i < line.length; i++) {
    const c = line[i];
    if (quoted) {
      if (c !== '"') cell += c;
      else if (line[i + 1] === '"') { cell += c; i++; }
      else quoted = false;
    } else if (c === '"' && start) {
      quoted = true;
    } else if (c === delimiter) {
      cells.push(cell);
      cell = "";
      start = true;
      continue;
    } else {
      cell += c;
    }
    start = false;
  }
  if (quoted) throw new DamagedFile(`must have no line break in a quoted cell, got one in row ${number}`);
  return [...cells, cell];
}

// The number that a cell is, as in Python; null if it is none.
function parseNumber(cell) {
  const text = cell.trim();
  if (NUMBER.test(text)) return Number(text);
  const infinite = INFINITE.exec(text);
  if (infinite) return infinite[1] === "-" ? -Infinity : Infinity;
  return /^[+-]?nan$/i.test(text) ? NaN : null;
}

function parseColumn(rows, column, name) {
  const values = new Float64Array(rows.length);
  rows.forEach((row, i) => {
    const value = parseNumber(row[column]);
    if (value === null || !Number.isFinite(Math.fround(value))) {
      const got = `${JSON.stringify(row[column].slice(0, 100))} in row ${i + 1}`;
      throw new DamagedFile(`must have finite numbers in column ${JSON.stringify(name)}, got ${got}`);
    }
    values[i] = value;
  });
  return values;
}

// ---- times

function parseTimes(rows, column, unit) {
  if (parseNumber(rows[0][column]) !== null) {
    return parseColumn(rows, column, "time").map((value) => value * SECONDS_PER_UNIT[unit || "s"]);
  }
  return Float64Array.from(rows, (row, i) => parseDate(row[column].trim(), i + 1));
}

// Seconds of 20180423_15:09:13.120 or of ISO 8601, to the microsecond. Time zones are left out: differences matter.
function parseDate(text, row) {
  if (!text) throw new DamagedFile(`has no time stamp in row ${row}`);
  const iso = text.replace(/^(\d{4})(\d{2})(\d{2})_/, "$1-$2-$3T").replace(/(:\d\d(?:\.\d+)?)(?:Z|[+-]\d\d:?\d\d)$/, "$1");
  const found = DATE.exec(iso);
  const [year, month, day, hour, minute, second] = (found || []).slice(1, 7).map((part) => Number(part ?? NaN));
  const whole = [year, month, day || 1, hour || 0, minute || 0, second || 0];
  const date = new Date(0);
  date.setUTCFullYear(whole[0], whole[1] - 1, whole[2]);
  date.setUTCHours(...whole.slice(3));
  const isSame = found && date.getUTCFullYear() === whole[0] && date.getUTCMonth() === whole[1] - 1 &&
    date.getUTCDate() === (found[3] ? day : 1) && date.getUTCHours() === whole[3] &&
    date.getUTCMinutes() === whole[4] && date.getUTCSeconds() === whole[5];
  if (!isSame) throw new DamagedFile(`must have numbers or dates as time stamps, got ${JSON.stringify(text.slice(0, 100))}`);
  const fraction = Number((found[7] || "").slice(0, 6).padEnd(6, "0"));
  return (date.getTime() * 1000 + fraction) * 1e-6;
}

// ---- a signal: one Float32Array per channel, and times in seconds or null

function readSignal(text, channels) {
  const { header, rows } = readCells(text);
  const names = header || namesWithoutHeader(rows[0].length, channels);
  const isTime = (name) => TIME_COLUMN.test(name) && !channels.includes(name);
  const timeColumn = names.findIndex(isTime);
  checkNames(names, channels);
  const unit = timeColumn >= 0 ? (TIME_COLUMN.exec(names[timeColumn])[1] || "").toLowerCase() : "";
  const times = timeColumn >= 0 ? parseTimes(rows, timeColumn, unit) : null;
  const samples = channels.map((name) => parseColumn(rows, names.indexOf(name), name));
  return sortByTime(samples, times);
}

function namesWithoutHeader(columns, channels) {
  if (columns === channels.length) return channels;
  if (columns === channels.length + 1) return ["time", ...channels];
  const wanted = `${channels.length} columns (${channels.join(", ")})`;
  throw new DamagedFile(`must have ${wanted}, or one more with the time first, since it has no header; got ${columns}`);
}

function checkNames(names, channels) {
  const got = names.join(", ").slice(0, 300);
  const missing = channels.find((name) => !names.includes(name));
  if (missing !== undefined) throw new DamagedFile(`must have the column ${JSON.stringify(missing)}, got ${got}`);
  const unclear = channels.find((name) => names.indexOf(name) !== names.lastIndexOf(name));
  if (unclear !== undefined) {
    throw new DamagedFile(`must have a unique name for every column, got ${JSON.stringify(unclear)} twice`);
  }
}

// Order samples by time. Of several with the same time, keep the first in the file.
function sortByTime(samples, times) {
  let order = Array.from(samples[0].keys());
  if (times) {
    order.sort((a, b) => times[a] - times[b] || a - b);
    order = order.filter((at, i) => i === 0 || times[at] !== times[order[i - 1]]);
  }
  if (order.length < 2) throw new DamagedFile(`must have 2 or more samples at different times, got ${order.length}`);
  const sorted = times && Float64Array.from(order, (at) => times[at]);
  if (sorted) checkTimes(sorted);
  return { samples: samples.map((channel) => Float32Array.from(order, (at) => channel[at])), times: sorted };
}

function medianStep(times) {
  const steps = Float64Array.from({ length: times.length - 1 }, (_, i) => times[i + 1] - times[i]).sort();
  const middle = steps.length >> 1;
  return steps.length % 2 ? steps[middle] : (steps[middle - 1] + steps[middle]) / 2;
}

function checkTimes(times) {
  const step = medianStep(times);
  if (!(step >= 1 / MAX_RATE && step < Infinity)) {
    throw new DamagedFile(`must have a median time step of ${1 / MAX_RATE} s or more, got ${step} s`);
  }
}

// ---- resampling

// A number rounded to four digits as Python's format does: a tie goes to the even digit.
function fourDigits(value) {
  const [digits, exponent] = value.toExponential(100).split("e");
  const isTie = /^\d\.\d{3}50*$/.test(digits);
  if (!isTie) return Number(value.toExponential(3));
  const down = Number(digits.slice(0, 5).replace(".", ""));
  return Number(`${down % 2 ? down + 1 : down}e${Number(exponent) - 3}`);
}

function sampleCount(duration, rate, before) {
  const steps = duration * rate + 1e-3;
  if (!(steps < MAX_GROWTH * before)) {
    const made = `which makes ${Math.floor(steps) + 1} samples at ${rate} Hz`;
    throw new DamagedFile(
      `must have its time stamps in seconds, got ${before} of them over ${duration} s, ${made}; ` +
      "name the time column time_ms, time_us or time_ns for other units");
  }
  if (!(steps < MAX_SAMPLES)) {
    throw new DamagedFile(`must have ${MAX_SAMPLES} samples or less at ${rate} Hz, got ${Math.floor(steps) + 1}`);
  }
  return Math.floor(steps) + 1;
}

// Samples at one rate, or at the file's median rate if `rate` is null. Without times they count as evenly spaced.
function resample(signal, rate) {
  if (!signal.times) return signal.samples;
  const times = signal.times.map((time) => time - signal.times[0]);
  const wanted = rate === null ? fourDigits(1 / medianStep(signal.times)) : rate;
  const duration = times[times.length - 1];
  const count = sampleCount(duration, wanted, times.length);
  if (count < 2) throw new DamagedFile(`must last 2 samples or more at ${wanted} Hz, got ${duration} s`);
  const at = Float64Array.from({ length: count }, (_, i) => i / wanted);
  return signal.samples.map((channel) => interpolate(channel, times, at));
}

// Linear interpolation as numpy.interp computes it; both times ascend.
function interpolate(values, times, at) {
  const result = new Float32Array(at.length), last = times.length - 1;
  for (let i = 0, j = 0; i < at.length; i++) {
    while (j < last && times[j + 1] <= at[i]) j++;
    if (j === last || times[j] === at[i]) result[i] = values[j];
    else result[i] = ((values[j + 1] - values[j]) / (times[j + 1] - times[j])) * (at[i] - times[j]) + values[j];
  }
  return result;
}

// ---- windows

// Cut samples into windows `[n, length, C]`, each with its first and last sample.
function makeWindows(samples, settings) {
  const { mode, length, hop } = settings, total = samples[0].length;
  if (mode === "clips" || total < length) return [{ start: 0, end: total - 1, values: oneWindow(samples, length) }];
  const windows = [];
  for (let start = 0; start + length <= total; start += hop) {
    const parts = samples.map((channel) => channel.subarray(start, start + length));
    windows.push({ start, end: start + length - 1, values: interleave(parts) });
  }
  return windows;
}

function oneWindow(samples, length) {
  const total = samples[0].length, step = (total - 1) / (length - 1);
  const times = Float64Array.from({ length: total }, (_, i) => i);
  const at = Float64Array.from({ length }, (_, i) => (i === length - 1 ? total - 1 : i * step));
  return interleave(samples.map((channel) => interpolate(channel, times, at)));
}

function interleave(channels) {
  const values = new Float32Array(channels.length * channels[0].length);
  channels.forEach((channel, c) => channel.forEach((value, t) => { values[t * channels.length + c] = value; }));
  return values;
}

// The windows of a file, and how many seconds a sample takes; null without a rate.
function readRecording(bytes, settings) {
  const samples = resample(readSignal(decode(bytes), settings.channels), settings.rate);
  return makeWindows(samples, settings);
}
