// A phone's motion events to samples at the rate of the training data.
"use strict";

const LONGEST_GAP = 1; // seconds without an event, after which windows start again

// What an event measures, in m/s^2 and degrees per second; null where the device has no such sensor.
function readEvent(event) {
  const axes = (vector, x = "x", y = "y", z = "z") => ({ x: vector?.[x] ?? null, y: vector?.[y] ?? null, z: vector?.[z] ?? null });
  const whole = axes(event.accelerationIncludingGravity), own = axes(event.acceleration);
  const gravity = {};
  for (const axis of "xyz") gravity[axis] = whole[axis] === null || own[axis] === null ? null : whole[axis] - own[axis];
  return {
    accelerationIncludingGravity: whole,
    acceleration: own,
    gravity,
    rotation: axes(event.rotationRate, "beta", "gamma", "alpha"), // about x, y and z
  };
}

// Whether an event has no number at all. Devices without sensors send one such event.
function isEmpty(motion) {
  return Object.values(motion).every((axes) => Object.values(axes).every((value) => value === null));
}

// One number per channel: the signal it is assigned times its scale; a channel without a signal is 0.
function selectChannels(motion, assigned) {
  return assigned.map(({ channel, signal, scale }) => {
    if (!signal) return 0;
    const [kind, axis] = signal.split(".");
    const value = motion[kind][axis];
    if (value === null) throw new Error(`this device must measure ${signal}, for the channel ${channel}, and does not`);
    return Math.fround(value * scale);
  });
}

// Interpolates between events at the times 0, 1 / rate, 2 / rate and so on after the first one.
class Resampler {
  constructor(rate) {
    Object.assign(this, { rate, first: null, time: null, values: null, count: 0 });
  }

  // Add an event; returns the samples up to its time.
  push(seconds, values) {
    if (this.first === null) this.first = seconds;
    const time = seconds - this.first, samples = [];
    if (this.time !== null && time <= this.time) return samples; // of the same time, the first counts
    for (; this.count / this.rate <= time; this.count++) samples.push(this.at(this.count / this.rate, time, values));
    Object.assign(this, { time, values });
    return samples;
  }

  at(when, time, values) {
    if (when === time) return values;
    if (when === this.time) return this.values;
    return values.map((value, c) => ((value - this.values[c]) / (time - this.time)) * (when - this.time) + this.values[c]);
  }
}

// Asks for the sensors where a browser wants that, and calls `listener` at every motion event; returns what stops it.
async function listenToMotion(listener) {
  if (!window.isSecureContext) throw new Error("motion sensors must be used over https, got an address without it");
  if (!("DeviceMotionEvent" in window)) throw new Error("this browser must have motion events, and has none");
  if (DeviceMotionEvent.requestPermission && (await DeviceMotionEvent.requestPermission()) !== "granted") {
    throw new Error("this page must be allowed to use the motion sensors, and was not");
  }
  window.addEventListener("devicemotion", listener);
  return () => window.removeEventListener("devicemotion", listener);
}
