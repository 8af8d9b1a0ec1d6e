// Browsers refuse workers to pages that are opened from a disk, and the search is one: there a frame takes its place.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(source) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = new URL(source, location);
      this.loaded = new Promise((done) => script.addEventListener("load", done));
      frame.contentDocument.body.append(script);
    }
    async postMessage(data) {
      await this.loaded;
      this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}
