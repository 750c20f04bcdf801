// Speech: recordings as 16-bit WAV, files as they are, both as base64 for the wire.

export const MOST_MB = 25;
const RATE = 16000; // what the models hear; more would only be sent in vain
const KINDS = { wav: 'wav', wave: 'wav', mp3: 'mp3', flac: 'flac', ogg: 'ogg', oga: 'ogg' };

/** wav, mp3, flac or ogg by the file's name; undefined for anything else. */
export const kindOf = (file) => KINDS[file.name.split('.').pop().toLowerCase()];

export function base64(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(',') + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** A kept sound with an address to hear it at. */
export function heard(audio) {
  const bytes = Uint8Array.from(atob(audio.data), (letter) => letter.charCodeAt(0));
  return { ...audio, url: URL.createObjectURL(new Blob([bytes], { type: `audio/${audio.format}` })) };
}

/** Samples between -1 and 1 as a mono WAV file of 16 bits. */
export function wavOf(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const write = (at, letters) => [...letters].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  write(0, 'RIFF');
  view.setUint32(4, 36 + 2 * samples.length, true);
  write(8, 'WAVEfmt ');
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  write(36, 'data');
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, i) => view.setInt16(44 + 2 * i, Math.max(-1, Math.min(1, sample)) * 32767, true));
  return new Blob([view], { type: 'audio/wav' });
}

async function resampled(samples, rate) {
  const offline = new OfflineAudioContext(1, Math.max(1, Math.ceil((samples.length * RATE) / rate)), RATE);
  const source = offline.createBufferSource();
  source.buffer = offline.createBuffer(1, Math.max(1, samples.length), rate);
  source.buffer.copyToChannel(samples, 0);
  source.connect(offline.destination);
  source.start();
  return (await offline.startRendering()).getChannelData(0);
}

function joined(pieces) {
  const whole = new Float32Array(pieces.reduce((length, piece) => length + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}

// Pages without HTTPS have no microphone, localhost apart.
export const canRecord = () => Boolean(navigator.mediaDevices?.getUserMedia && window.AudioWorkletNode);

export class Recorder {
  #pieces = [];

  async start() {
    this.stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    this.context = new AudioContext();
    await this.context.audioWorklet.addModule('/page/recorder.js');
    const node = new AudioWorkletNode(this.context, 'recorder');
    node.port.onmessage = ({ data }) => this.#pieces.push(data);
    this.context.createMediaStreamSource(this.stream).connect(node);
    node.connect(this.context.destination); // it writes silence; unconnected nodes need not run
  }

  async stop() {
    this.stream.getTracks().forEach((track) => track.stop());
    const rate = this.context.sampleRate;
    await this.context.close();
    return wavOf(await resampled(joined(this.#pieces), rate), RATE);
  }
}
