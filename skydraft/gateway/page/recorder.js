// Runs beside the page's own thread and hands it the samples of the first channel.

class Recorder extends AudioWorkletProcessor {
  process([input]) {
    if (input[0]) this.port.postMessage(input[0].slice());
    return true;
  }
}

registerProcessor('recorder', Recorder);
