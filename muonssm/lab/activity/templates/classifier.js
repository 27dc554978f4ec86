// The exported programs, run by onnxruntime-web in one thread. It reads nothing over the network: all is in scripts.
"use strict";

const BATCH = 16; // windows that are classified in one call

function fromBase64(text) {
  const raw = atob(text);
  return Uint8Array.from({ length: raw.length }, (_, i) => raw.charCodeAt(i));
}

async function decompress(bytes) {
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

async function loadClassifier(settings, programs, runtime) {
  const glue = new Blob([fromBase64(runtime.glue)], { type: "text/javascript" });
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = { mjs: URL.createObjectURL(glue) };
  ort.env.wasm.wasmBinary = await decompress(fromBase64(runtime.program));
  const open = (program) => ort.InferenceSession.create(fromBase64(program), { executionProviders: ["wasm"] });
  const window = await open(programs.window);
  return new Classifier(settings, window, programs.step && (await open(programs.step)));
}

class Classifier {
  constructor(settings, window, step) {
    Object.assign(this, { settings, window, step });
  }

  // The probabilities of each window; `progress` hears how many are done, and the browser can draw in between.
  async classify(windows, progress = () => {}) {
    const { length, channels } = this.settings, size = length * channels.length, results = [];
    for (let first = 0; first < windows.length; first += BATCH) {
      const batch = windows.slice(first, first + BATCH);
      const values = new Float32Array(batch.length * size);
      batch.forEach((window, i) => values.set(window.values, i * size));
      const samples = new ort.Tensor("float32", values, [batch.length, length, channels.length]);
      const { probabilities } = await this.window.run({ samples });
      batch.forEach((window, i) => results.push(this.result(window.start, window.end, probabilities.data, i)));
      progress(results.length);
      await new Promise((done) => setTimeout(done));
    }
    return results;
  }

  // Row i of probabilities with the window's bounds and its best class.
  result(start, end, data, i) {
    const count = this.settings.classes.length;
    const probabilities = Array.from(data.slice(i * count, (i + 1) * count));
    if (!probabilities.every(Number.isFinite)) {
      throw new DamagedFile(
        `must have values near those of the training data in samples ${start} to ${end}: the probabilities are not finite`);
    }
    const best = probabilities.indexOf(Math.max(...probabilities));
    return { start, end, label: this.settings.classes[best], probability: probabilities[best], probabilities };
  }
}

// Classify windows sample by sample in constant memory. Windows overlap and each starts from an empty state, so
// length / hop of them, rounded up, are rows of one batch.
class Stream {
  constructor(classifier) {
    const { length, hop, state, channels } = classifier.settings;
    Object.assign(this, { classifier, length, hop, channels: channels.length, count: 0 });
    this.rows = Math.ceil(length / hop);
    const zeros = ([name, sizes]) => {
      const shape = [this.rows, ...sizes];
      return [name, new ort.Tensor("float32", new Float32Array(shape.reduce((a, b) => a * b)), shape)];
    };
    this.state = Object.fromEntries(Object.entries(state).map(zeros));
  }

  // Add a sample; returns the oldest window so far, and whether it ended with this sample.
  async feed(sample) {
    if (this.count % this.hop === 0) this.startWindow((this.count / this.hop) % this.rows);
    const values = new Float32Array(this.rows * this.channels);
    for (let row = 0; row < this.rows; row++) values.set(sample, row * this.channels);
    const given = { sample: new ort.Tensor("float32", values, [this.rows, this.channels]), ...this.state };
    const after = await this.classifier.step.run(given);
    for (const name of Object.keys(this.state)) this.state[name] = after[`next_${name}`];
    this.count++;
    const window = Math.max(0, Math.ceil((this.count - this.length) / this.hop)), start = window * this.hop;
    const result = this.classifier.result(start, this.count - 1, after.probabilities.data, window % this.rows);
    return { ...result, isWhole: this.count === start + this.length };
  }

  startWindow(row) {
    for (const { data, dims } of Object.values(this.state)) {
      const size = data.length / dims[0];
      data.fill(0, row * size, (row + 1) * size);
    }
  }
}
