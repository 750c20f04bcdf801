// Speech: recordings become 16-bit WAV, files stay as they are. Both are sent as base64.

import { make } from './dom.js';

const RATE = 16000; // Hz; the models use no more
const KINDS = { wav: 'wav', wave: 'wav', mp3: 'mp3', flac: 'flac', ogg: 'ogg', oga: 'ogg' };

/** wav, mp3, flac or ogg from the file's name; undefined for anything else. */
export const kindOf = ({ name }) => KINDS[name.split('.').pop().toLowerCase()];

export function base64(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(',') + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** A player for a sound, with its name. */
export function player({ data, format, name }) {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const url = URL.createObjectURL(new Blob([bytes], { type: `audio/${format}` }));
  const sound = make('audio', { controls: true, preload: 'metadata', src: url, 'aria-label': name });
  return make('figure', { class: 'sound' }, make('figcaption', {}, name), sound);
}

/** Converts a recording in the browser's format to a mono WAV file. */
async function wavOf(recorded) {
  const sound = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await recorded.arrayBuffer());
  const samples = Int16Array.from(sound.getChannelData(0), (each) => Math.max(-1, Math.min(1, each)) * 32767);
  const [riff, wave, format, data] = [0x46464952, 0x45564157, 0x20746d66, 0x61746164];
  const size = samples.byteLength; // then: PCM in one channel, samples and bytes a second, 2 bytes of 16 bits
  const head = [riff, 36 + size, wave, format, 16, 0x10001, RATE, 2 * RATE, 0x100002, data, size];
  return new Blob([Uint32Array.from(head), samples], { type: 'audio/wav' });
}

// Without HTTPS only pages of localhost have a microphone.
export const canRecord = () => Boolean(navigator.mediaDevices?.getUserMedia && window.MediaRecorder);

/** Starts recording. Returns a function that stops it and returns the WAV file. */
export async function record() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
  const recorder = new MediaRecorder(stream);
  const pieces = [];
  recorder.addEventListener('dataavailable', ({ data }) => pieces.push(data));
  recorder.start();
  return async () => {
    const ended = new Promise((resolve) => recorder.addEventListener('stop', resolve));
    recorder.stop();
    await ended;
    for (const track of stream.getTracks()) track.stop();
    return wavOf(new Blob(pieces));
  };
}
